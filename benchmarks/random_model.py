"""A model of any size with random weights: for what depends on size alone.

python -m benchmarks.random_model benchmarks/.models/gpt2_6x512 --layers 6 --width 512 --vocabulary 50257
python -m benchmarks.random_model benchmarks/.models/1.7b --like benchmarks/.models/smollm2 --set hidden_size=2048
    num_hidden_layers=24 num_attention_heads=32 num_key_value_heads=32 intermediate_size=8192

The first is a GPT-2 with a tokenizer of numbers; the second has the family and the tokenizer of another model.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def save_like(model: str, sizes: list[str], folder: Path, seed: int) -> None:
    """Save a model with random weights.

    Args:
        model: folder of a config and a tokenizer.
        sizes: `KEY=NUMBER`, keys of the config.
        folder: where the model and its tokenizer are saved.
        seed: of the weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    for size in sizes:
        key, _, number = size.partition("=")
        setattr(config, key, int(number))
    if "hidden_size" in dict(size.split("=") for size in sizes):
        config.head_dim = config.hidden_size // config.num_attention_heads

    # On a GPU, where drawing billions of numbers takes a second.
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    print(f"{made.num_parameters():,} parameters in {folder}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--like", help="folder of a model whose family and tokenizer are taken; its weights are not read"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=NUMBER", help="sizes in the config of --like")
    options = parser.parse_args(arguments)
    if options.like is not None:
        save_like(options.like, options.set, options.folder, options.seed)
        return

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
