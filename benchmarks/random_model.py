"""A GPT-2 of any size with random weights, and a tokenizer of numbers: for what depends on size alone.

python -m benchmarks.random_model benchmarks/.models/gpt2_6x512 --layers 6 --width 512 --vocabulary 50257
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    from rl4lms_like.small_models.warm_start import make_model, make_word_tokenizer

    tokenizer = make_word_tokenizer([str(number) for number in range(options.vocabulary - 1)])
    model = make_model(
        tokenizer,
        n_layer=options.layers,
        n_embd=options.width,
        n_head=max(4, options.width // 64),
        n_positions=options.positions,
        seed=options.seed,
    )
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print(f"{model.num_parameters():,} parameters in {options.folder}")


if __name__ == "__main__":
    main()
