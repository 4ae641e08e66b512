"""One iteration of GRPO with LoRA on SmolLM2-135M, side by side: this library and TRL.

    python -m benchmarks.grpo_real benchmarks/.models/smollm2             5 iterations after two warm-ups
    python -m benchmarks.grpo_real benchmarks/.models/smollm2 --keep_freed_memory
    python -m benchmarks.grpo_real benchmarks/.models/smollm2 --quick     does everything run? (tiny work)

The folder is made by `benchmarks.real_model`. An iteration is 4 prompts of 46 tokens with 8 responses of 32 tokens
each, and one optimizer step of LoRA (rank 16, all linear layers), in float32 on one thread, with a KL penalty to the
base model in both systems. They take turns, and the ratio is the median of ratios within a round.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ppo_iteration import RESULTS, add_options, console, measure, write
from benchmarks.workload import SPECIAL, Shape

SYSTEMS = ("ours_grpo", "trl_grpo")
SHAPE = Shape(
    "smollm2",
    prompt_len=46,
    response_len=32,
    episodes=32,
    n_epochs=1,
    minibatch=32,
    n_layer=30,
    n_embd=576,
    vocab_size=49152,
    family="Llama",
)
QUICK_SHAPE = replace(SHAPE, response_len=4, episodes=8, minibatch=8)
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
N_WARM_UP = 2
N_WORDS = 2000
WORD = re.compile("Ġ[a-z]{3,}")
"""A token that is a whole word in the middle of a text."""

KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""glibc keeps the memory of freed tensors, instead of mapping and zeroing each large one again."""


def with_an_end_that_is_never_sampled(model: Path, folder: Path) -> list[int]:
    """Copy a model with another end token, one past its vocabulary, so that every response has full length.

    Args:
        model: folder of the model and its tokenizer.
        folder: folder of the copy; the weights are links.

    Returns:
        Token ids of words. A text of such words is encoded as one token a word.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    for weights in model.glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights.resolve())
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    words = sorted(token_id for token, token_id in tokenizer.get_vocab().items() if WORD.fullmatch(token))
    tokenizer.add_special_tokens({"eos_token": SPECIAL, "pad_token": SPECIAL})
    tokenizer.chat_template = None  # prompts are plain texts
    tokenizer.save_pretrained(folder)

    end = tokenizer.eos_token_id
    config = AutoConfig.from_pretrained(model)
    config.eos_token_id = config.pad_token_id = None
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=end, pad_token_id=end).save_pretrained(folder)
    return words[:N_WORDS]


@contextmanager
def job_with(model: Path) -> Iterator[dict[str, Any]]:
    """Return what the job of each system has in addition, with a copy of the model that exists within the block."""
    with tempfile.TemporaryDirectory() as folder:
        words = with_an_end_that_is_never_sampled(model, Path(folder))
        yield {"model": Path(folder), "words": words, "lora": LORA}


def summary(systems: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return medians of each system, and the ratio of CPU times to TRL's within a round."""
    rows = {}
    for name, system in systems.items():
        iterations = system["iterations"]
        pairs = zip(iterations, systems["trl_grpo"]["iterations"], strict=True)
        rows[name] = {
            "cpu_s": statistics.median(iteration["cpu_s"] for iteration in iterations),
            "wall_s": statistics.median(iteration["wall_s"] for iteration in iterations),
            "others_cores": statistics.median(iteration["others_cores"] for iteration in iterations),
            "peak_mb": iterations[-1]["peak_mb"],
            "cpu_times_trl": statistics.median(mine["cpu_s"] / trl["cpu_s"] for mine, trl in pairs),
        }
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of SmolLM2-135M, made by benchmarks.real_model")
    parser.add_argument("--keep_freed_memory", action="store_true", help="malloc settings, the same for both systems")
    add_options(parser, n_warm_up=N_WARM_UP)
    options = parser.parse_args(arguments)

    shape = QUICK_SHAPE if options.quick else SHAPE
    environment = KEEP_FREED_MEMORY if options.keep_freed_memory else {}
    with job_with(options.model) as job:
        measured = measure(shape, SYSTEMS, options, n_warm_up=N_WARM_UP, environment=environment, **job)

    rows = summary(measured["systems"])
    for name, row in rows.items():
        console.print(
            f"{name}: {row['cpu_s']:.1f} CPU s, {row['cpu_times_trl']:.2f} of TRL's, peak {row['peak_mb']:.0f} MiB, "
            f"others {row['others_cores']:.2f} cores"
        )
    name = "grpo_real_keep_freed_memory" if options.keep_freed_memory else "grpo_real"
    results = {"lora": LORA, "environment": environment, **measured, "summary": rows}
    write(options.output or RESULTS / f"{name}.json", options, results)


if __name__ == "__main__":
    main()
