"""Rollouts that a vLLM server generates during the update before them (`engine: {ahead: 1}`), next to the usual order.

    python -m benchmarks.one_step_ahead --seeds 5

GRPO trains a tiny GPT-2 with a server on this machine (`benchmarks.vllm_server`) for 20 iterations. Each update is
made longer by sleeping, as if it ran on a device of its own. The reward is that of the last three rollouts, with a
95 % interval over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.on_policy_pairs import with_interval
from benchmarks.vllm_server import REQUIREMENTS, served
from benchmarks.vllm_training import config_of, free_port
from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.run import train_config
from rl4lms_like.testing.models import make_causal_lm, make_tokenizer, save_model

RESULTS = Path(__file__).parent / "results" / "one_step_ahead.json"
ITERATIONS, PAUSE_S = 20, 2.0


class SlowGRPO(GRPO):
    """GRPO whose updates take longer."""

    def train(self) -> None:
        """Run an update and sleep."""
        time.sleep(PAUSE_S)
        super().train()


def trained(model: Path, url: str, folder: Path, ahead: int, seed: int) -> dict[str, Any]:
    """Run an experiment and return its figures."""
    blocks = config_of(model, url, folder / "weights", "grpo", {})
    blocks["alg"]["id"] = "benchmarks.one_step_ahead:SlowGRPO"
    blocks["alg"]["policy"]["args"]["engine"]["ahead"] = ahead
    blocks["train_evaluation"]["n_iters"], blocks["seed"] = ITERATIONS, seed
    config, name = parse_config(blocks), f"ahead_{ahead}_{seed}"
    run = train_config(config, base_path_to_store_results=folder, experiment_name=name, quiet=True)
    rollouts = [json.loads(line) for line in (run / "rollout_info.jsonl").read_text().splitlines()]
    inner = slice(2, -1)  # the first rollouts wait for the server to start, the last update has no rollout beside it
    return {
        "ahead": ahead,
        "seed": seed,
        "iteration_s": median(line["time/iteration_s"] for line in rollouts[inner]),
        "generate_s": median(line["time/generate_s"] for line in rollouts[inner]),
        "update_s": median(line["time/update_s"] for line in rollouts[inner]) + PAUSE_S,
        "reward": fmean(line["rollout_info/ep_rew"] for line in rollouts[-3:]),
        "reward before": rollouts[0]["rollout_info/ep_rew"],
        "effective_sample_size": min(line["rollout_info/effective_sample_size"] for line in rollouts),
    }


def main() -> None:
    """Train, print and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (%(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("RL4LMS_LIKE_CODE", str(Path(__file__).parents[1]))
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as place, open(Path(place) / "server.log", "wb") as log:
        folder, tokenizer = Path(place), make_tokenizer()
        model = make_causal_lm("gpt2", tokenizer, hidden_size=128, scale=3.0)
        save_model(folder / "gpt2", model, tokenizer)
        with served(folder / "gpt2", free_port(), log, more=("--max-model-len", "128")) as url:
            for seed in range(options.seeds):
                for ahead in (0, 1):
                    rows.append(trained(folder / "gpt2", url, folder, ahead, seed))
                    print(json.dumps(rows[-1]), flush=True)
    for ahead in (0, 1):
        own = [row for row in rows if row["ahead"] == ahead]
        seconds = {key: round(median(row[key] for row in own), 2) for key in ("iteration_s", "generate_s", "update_s")}
        print(f"ahead {ahead}: {seconds}, reward {with_interval([row['reward'] for row in own])}")
    found = {"server": REQUIREMENTS[0], "pause_s": PAUSE_S, "iterations": ITERATIONS, "runs": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
