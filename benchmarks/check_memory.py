"""Peak memory of runs with long prompts, next to the two numbers that `check` prints before they start.

    python -m benchmarks.check_memory             # 8 shapes, replies of full length and of one token; 4 minutes
    python -m benchmarks.check_memory --other     # the same for a model of another size, nothing written
    python -m benchmarks.check_memory --quick     # one small shape, nothing written

    full        every response has `max_new_tokens` tokens
    shortest    every response is the end token

A shape is with or without groups (GRPO, PPO), with or without LoRA, and in float32 or bfloat16. Each run, and each
estimate, is a process of its own. Shortest responses end because the collector takes every token for an end token, so
that both runs of a shape have one config. The peak is the high-water mark of the process in /proc/self/status.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ppo_iteration import RESULTS, machine
from rl4lms_like.callbacks.base import Callback
from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.on_policy.assemble import AssembledRun, assemble
from rl4lms_like.on_policy.trainer import OnPolicyTrainer
from rl4lms_like.testing.models import make_word_tokenizer, save_model
from rl4lms_like.tracking.base import SilentTracker

MIB = 2**20
VOCABULARY = 8192
SIZES = {"prompt": 96, "response": 4, "width": 384, "layers": 6, "n_envs": 8, "micro_batch_size": 800}
OTHER = {"prompt": 128, "response": 8, "width": 256, "layers": 4, "n_envs": 16, "micro_batch_size": 1600}
QUICK = {"prompt": 32, "response": 4, "width": 32, "layers": 2, "n_envs": 8, "micro_batch_size": 288}


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """Save a random Llama and a tokenizer whose tokens are numbers."""
    tokenizer = make_word_tokenizer(str(number) for number in range(VOCABULARY - 3))
    width = sizes["width"]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=sizes["layers"],
        num_attention_heads=width // 16,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(folder, LlamaForCausalLM(config), tokenizer)


def config_of(model: Path, sizes: dict[str, int], *, groups: bool, lora: bool, bfloat16: bool) -> dict[str, Any]:
    """Return the config of a shape."""
    length = sizes["response"]
    args: dict[str, Any] = {
        "n_steps": length,
        "batch_size": sizes["n_envs"] * length,
        "n_epochs": 1,
        "learning_rate": 1e-5,
        "micro_batch_size": sizes["micro_batch_size"],
    }
    if groups:
        args["group_size"] = 4
    policy: dict[str, Any] = {
        "model_name": str(model),
        "dtype": "bfloat16" if bfloat16 else "float32",
        "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": length},
    }
    if lora:
        policy["peft"] = {"r": 8, "target_modules": "all-linear"}
    prompt = " ".join(str(number) for number in range(sizes["prompt"]))
    return {
        "tokenizer": {"model_name": str(model), "padding_side": "left"},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": length}},
        "datapool": {"id": "dummy_pool", "args": {"prompt": prompt, "n_samples": 8}},
        "env": {
            "n_envs": sizes["n_envs"],
            "args": {
                "max_prompt_length": sizes["prompt"],
                "max_episode_length": length,
                "terminate_on_eos": True,
            },
        },
        "alg": {
            "id": "grpo" if groups else "ppo",
            "args": args,
            "kl_div": {"coeff": 0.01},
            "policy": {"id": "causal_lm_actor_critic_policy", "args": policy},
        },
        "train_evaluation": {
            "eval_batch_size": 8,
            "n_iters": 2,
            "eval_every": 100,
            "metrics": [{"id": "increasing_numbers", "args": {"min_tokens": length}}],
        },
        "n_threads": 1,
        "device": "cpu",
    }


def estimate(config: dict[str, Any]) -> dict[str, Any]:
    """Return what `check` says of a config: its two numbers and the parts, in MiB."""
    memory = estimate_memory(parse_config(config))
    return {
        "lower": memory.lower / MIB,
        "upper": memory.upper / MIB,
        "parts": {name: size / MIB for name, size in memory.parts.items()},
    }


class HighWaterMark(Callback):
    """Records the peak of the process after each iteration; with `shortest`, a first token ends every response."""

    def __init__(self, run: AssembledRun, *, shortest: bool) -> None:
        self.peaks: list[float] = []
        if shortest:
            run.algorithm.collector.eos_token_ids[:] = range(VOCABULARY)  # the list that the collector reads

    def on_iteration_end(self, iteration: int) -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        self.peaks.append(int(status["VmHWM"].split()[0]) / 1024)


def train(config: dict[str, Any], replies: str, folder: str) -> dict[str, Any]:
    """Train a model and return the peak memory of this process, in MiB, after each iteration."""
    parsed = parse_config(config)
    made = assemble(parsed)
    trainer = OnPolicyTrainer(made, SilentTracker(Path(folder), parsed.to_dict()))
    mark = HighWaterMark(made, shortest=replies == "shortest")
    trainer.callbacks["high_water_mark"] = mark
    trainer.train_and_eval()
    return {"peaks": mark.peaks, "peak": mark.peaks[-1], "episodes": made.algorithm.rollout_buffer.episodes.n_episodes}


def measured(arguments: list[str]) -> dict[str, Any]:
    """Return the result of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.check_memory", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        raise RuntimeError(process.stderr[-3000:])
    return dict(json.loads(process.stdout.splitlines()[-1]))


def measure(model: Path, sizes: dict[str, int], *, groups: bool, lora: bool, bfloat16: bool) -> dict[str, Any]:
    """Return the two numbers of `check` for a shape, and the peaks of both of its runs, in MiB."""
    config = config_of(model, sizes, groups=groups, lora=lora, bfloat16=bfloat16)
    row: dict[str, Any] = {"groups": groups, "lora": lora, "bfloat16": bfloat16}
    with tempfile.TemporaryDirectory() as folder:
        for replies in ("check", "full", "shortest"):
            row[replies] = measured(["--process", json.dumps({"config": config, "replies": replies}), folder])

    check = row["check"]
    row["full_is_between"] = check["lower"] <= row["full"]["peak"] <= check["upper"]
    row["upper_by_shortest"] = check["upper"] / row["shortest"]["peak"]
    return row


def main() -> None:
    """Measure all shapes, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small shape, nothing written")
    parser.add_argument("--other", action="store_true", help="a model of another size, nothing written")
    parser.add_argument("--process", nargs=2, metavar=("JOB", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        job = json.loads(arguments.process[0])
        replies = job["replies"]
        result = estimate(job["config"]) if replies == "check" else train(job["config"], replies, arguments.process[1])
        print(json.dumps(result))
        return

    sizes = SIZES
    if arguments.quick or arguments.other:
        sizes = QUICK if arguments.quick else OTHER
    shapes = list(itertools.product([False, True], repeat=3))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, sizes)
        for groups, lora, bfloat16 in shapes[:1] if arguments.quick else shapes:
            rows.append(measure(model, sizes, groups=groups, lora=lora, bfloat16=bfloat16))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    table = Table("groups", "LoRA", "bfloat16", "check", "full", "shortest", "upper / shortest")
    for row in rows:
        check = f"{row['check']['lower']:.0f} to {row['check']['upper']:.0f}"
        peaks = [f"{row[replies]['peak']:.0f}" for replies in ("full", "shortest")]
        flags = ["yes" if row[name] else "" for name in ("groups", "lora", "bfloat16")]
        table.add_row(*flags, check, *peaks, f"{row['upper_by_shortest']:.2f}")
    Console(width=100).print(table)
    if sizes is SIZES:
        results = {"date": date.today().isoformat(), "machine": machine(), "sizes": sizes, "rows": rows}
        (RESULTS / "check_memory.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
