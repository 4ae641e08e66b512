"""Time of a PPO iteration with several processes next to one process, and its fraction spent in communication.

    python -m benchmarks.several_processes --shape ii --ranks 1,2 --rounds 5

Each process has one thread. The runs with different numbers of processes alternate; the first iteration of each, which
fills caches, does not count. Printed are medians over all other iterations.

`--apart` adds what the machine allows: for each number of processes, as many runs of one process at the same time, each
with its share of the episodes and of the minibatches, which need no communication.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.workload import SHAPES, Shape
from rl4lms_like.testing.models import make_word_tokenizer

N_ITERS = 4


def config_of(shape: Shape, model: Path) -> dict[str, Any]:
    """Return the config of PPO with a separate critic and a reference model."""
    generation = {"do_sample": True, "top_k": 0, "max_new_tokens": shape.response_len}
    return {
        "tokenizer": {"model_name": str(model)},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": shape.response_len}},
        "datapool": {
            "id": "dummy_pool",
            "args": {"n_samples": 1, "prompt": " ".join(map(str, range(shape.prompt_len)))},
        },
        "env": {
            "n_envs": shape.episodes,
            "args": {
                "max_prompt_length": shape.prompt_len,
                "max_episode_length": shape.response_len,
                "terminate_on_eos": False,
            },
        },
        "alg": {
            "id": "ppo",
            "args": {
                "n_steps": shape.response_len,
                "batch_size": shape.minibatch * shape.response_len,
                "n_epochs": shape.n_epochs,
                "learning_rate": 1e-5,
            },
            "kl_div": {"coeff": 0.1},
            "policy": {
                "id": "causal_lm_actor_critic_policy",
                "args": {"model_name": str(model), "generation_kwargs": generation},
            },
        },
        "train_evaluation": {"eval_batch_size": 1, "n_iters": N_ITERS, "eval_every": N_ITERS, "save_model": False},
        "doctor": {"enabled": False},
        "n_threads": 1,
    }


def make_model(shape: Shape, folder: Path) -> None:
    """Write a random GPT-2 of this shape, and a tokenizer whose words are numbers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = make_word_tokenizer(map(str, range(shape.vocab_size)))
    config = GPT2Config(
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        n_head=max(4, shape.n_embd // 64),
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def seconds_of(config: Path, n_ranks: int, folder: Path) -> list[dict[str, float]]:
    """Run a config; return the `time/*` numbers of each iteration but the first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n_ranks)]
    command += ["-m", "rl4lms_like", "train", str(config), "--base_path_to_store_results", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    lines: list[dict[str, float]] = []
    for file in folder.rglob("*.jsonl"):
        found = [json.loads(line) for line in file.read_text().splitlines()]
        lines += [line for line in found if "time/iteration_s" in line][1:]
    return lines


def seconds_apart(shape: Shape, n_runs: int, model: Path, folder: Path) -> list[dict[str, float]]:
    """Run `n_runs` runs of one process at the same time; return the `time/*` numbers of all of them."""
    share = dataclasses.replace(shape, episodes=shape.episodes // n_runs, minibatch=shape.minibatch // n_runs)
    folder.mkdir()
    config = folder / "config.yml"
    config.write_text(yaml.safe_dump(config_of(share, model)))
    with ThreadPoolExecutor(n_runs) as pool:
        found = pool.map(lambda run: seconds_of(config, 1, folder / str(run)), range(n_runs))
        return [line for lines in found for line in lines]


def main() -> None:
    """Run the rounds, and print one line for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="ii")
    parser.add_argument("--ranks", default="1,2", help="numbers of processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--apart", action="store_true", help="add runs that do not communicate")
    options = parser.parse_args()
    shape, numbers = SHAPES[options.shape], [int(each) for each in options.ranks.split(",")]
    kinds = ["processes", "runs apart"] if options.apart else ["processes"]
    lines: dict[tuple[str, int], list[dict[str, float]]] = {(kind, n): [] for kind in kinds for n in numbers}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        make_model(shape, base / "model")
        (base / "config.yml").write_text(yaml.safe_dump(config_of(shape, base / "model")))
        for index in range(options.rounds):
            for n_ranks in numbers:
                lines["processes", n_ranks] += seconds_of(base / "config.yml", n_ranks, base / f"{index}_{n_ranks}")
                if options.apart:
                    folder = base / f"{index}_{n_ranks}_apart"
                    lines["runs apart", n_ranks] += seconds_apart(shape, n_ranks, base / "model", folder)
    first = statistics.median(line["time/iteration_s"] for line in lines["processes", numbers[0]])
    for (kind, n_ranks), found in lines.items():
        seconds = statistics.median(line["time/iteration_s"] for line in found)
        waited = statistics.median(line.get("time/communication_s", 0.0) for line in found)
        ratio, fraction = first / seconds, waited / seconds
        print(f"{n_ranks} {kind}: {seconds:.2f} s, {ratio:.2f} times as fast; {fraction:.1%} in communication")


if __name__ == "__main__":
    main()
