"""One iteration of GRPO with LoRA on SmolLM2-135M, side by side: this library and TRL.

    python -m benchmarks.grpo_real benchmarks/.models/smollm2             5 iterations after two warm-ups
    python -m benchmarks.grpo_real benchmarks/.models/smollm2 --keep_freed_memory
    python -m benchmarks.grpo_real benchmarks/.models/smollm2 --quick     does everything run? (tiny work)
    python -m benchmarks.grpo_real FOLDER --device cuda --dtype bfloat16 --episodes 64 --response_len 256

The folder is made by `benchmarks.real_model`. An iteration is 4 prompts of 46 tokens with 8 responses of 32 tokens
each, and one optimizer step of LoRA (rank 16, all linear layers), in float32 on one thread, with a KL penalty to the
base model in all systems. They take turns, and the ratio is the median of ratios of CPU times within a round, with a
GPU of wall times. `ours_grpo_bfloat16` generates in bfloat16 and has a reference in bfloat16, `ours_grpo_compiled`
has compiled decoding.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ppo_iteration import RESULTS, add_options, console, measure, write
from benchmarks.workers import SYSTEMS as ALL_SYSTEMS
from benchmarks.workers import System
from benchmarks.workload import SPECIAL, Shape

SYSTEMS = ("ours_grpo", "trl_grpo")
SYSTEMS_HELP = "some of ours_grpo, ours_grpo_bfloat16, ours_grpo_compiled; and trl_grpo"
IN_BFLOAT16 = {"generation_dtype": "bfloat16", "reference_dtype": "bfloat16"}
"""Arguments of the policy of `ours_grpo_bfloat16`."""
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


def summary(systems: Mapping[str, Mapping[str, Any]], shape: Shape, clock: str) -> dict[str, dict[str, float]]:
    """Return medians of each system, and the ratio of its time to TRL's within a round.

    Args:
        systems: as `measure` returns them.
        shape: of the work.
        clock: `cpu_s` or `wall_s`: what the ratio is of.
    """
    rows = {}
    for name, system in systems.items():
        iterations = system["iterations"]
        pairs = zip(iterations, systems["trl_grpo"]["iterations"], strict=True)
        keys = ("cpu_s", "wall_s", "rollout_s", "update_s", "others_cores")
        row = {key: statistics.median(iteration[key] for iteration in iterations) for key in keys}
        peak = "gpu_peak_mb" if "gpu_peak_mb" in iterations[-1] else "peak_mb"
        rows[name] = row | {
            peak: iterations[-1][peak],
            "tokens_per_s": shape.response_tokens / row["wall_s"],
            "times_trl": statistics.median(mine[clock] / trl[clock] for mine, trl in pairs),
        }
    return rows


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the work of an iteration; sizes of another model than SmolLM2-135M are those of its folder."""
    if options.quick:
        return QUICK_SHAPE
    chosen = {key: getattr(options, key) for key in ("prompt_len", "response_len", "episodes") if getattr(options, key)}
    shape = replace(SHAPE, **chosen)
    config = json.loads((options.model / "config.json").read_text())
    sizes = {
        "n_layer": config["num_hidden_layers"],
        "n_embd": config["hidden_size"],
        "vocab_size": config["vocab_size"],
    }
    return replace(shape, minibatch=shape.episodes, **sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of SmolLM2-135M, made by benchmarks.real_model")
    parser.add_argument("--keep_freed_memory", action="store_true", help="malloc settings, the same for all systems")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"{SYSTEMS_HELP} (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32", help="bfloat16: computation under autocast in all (with a GPU)")
    for key in ("prompt_len", "response_len", "episodes"):
        parser.add_argument(f"--{key}", type=int, help=f"instead of {getattr(SHAPE, key)}")
    add_options(parser, n_warm_up=N_WARM_UP)
    options = parser.parse_args(arguments)
    if options.device == "cpu" and options.dtype != "float32":
        parser.error("--dtype needs --device cuda: on a processor, TRL computes in float32")

    shape = shape_of(options)
    job: dict[str, Any] = {"device": options.device, "policy": {"dtype": options.dtype}}
    job["environment"] = KEEP_FREED_MEMORY if options.keep_freed_memory else {}

    # Variants of this library: in bfloat16, and with compiled decoding.
    decoding = {"do_sample": True, "top_k": 0, "max_new_tokens": shape.response_len, "cache_implementation": "static"}
    decoding["max_cache_len"] = shape.prompt_len + shape.response_len
    for name, arguments in (("bfloat16", IN_BFLOAT16), ("compiled", {"generation_kwargs": decoding})):
        of_system = {"algorithm": "grpo", "policy": {**job["policy"], **arguments}}
        ALL_SYSTEMS[f"ours_grpo_{name}"] = System("ours", job=of_system)
    with job_with(options.model) as of_model:
        measured = measure(shape, options.systems.split(","), options, n_warm_up=N_WARM_UP, **job, **of_model)

    clock = "cpu_s" if options.device == "cpu" else "wall_s"
    rows = summary(measured["systems"], shape, clock)
    for name, row in rows.items():
        peak = row.get("gpu_peak_mb", row.get("peak_mb"))
        console.print(
            f"{name}: {row[clock]:.2f} s, {row['times_trl']:.2f} of TRL's, {row['tokens_per_s']:.0f} tokens/s, "
            f"peak {peak:.0f} MiB, others {row['others_cores']:.2f} cores"
        )
    name = "grpo_real_keep_freed_memory" if options.keep_freed_memory else "grpo_real"
    results = {"lora": LORA, **job, **measured, "summary": rows}
    write(options.output or RESULTS / f"{name}.json", options, results)


if __name__ == "__main__":
    main()
