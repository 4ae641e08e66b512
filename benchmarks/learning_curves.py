"""Learning curves of PPO and GRPO on a task with verifiable answers, which `scripts.docs.pictures` draws.

    python -m benchmarks.learning_curves                     # seeds 0-2; about two CPU minutes

The runs are those of task_configs/sums: a tiny GPT-2 that was trained on sums, half of them with a wrong result, is
rewarded for right ones. All runs have 20,480 responses. The mean reward of a rollout is the fraction of right results
among its 256 responses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from rl4lms_like.config.load import load_config
from rl4lms_like.run import environment, train_config

CONFIGS = Path(__file__).parents[1] / "task_configs/sums"
RESULTS = Path(__file__).parent / "results" / "learning_curves.json"
N_RESPONSES = 256  # of a rollout, in both files
N_ITERS = 80

RUNS = {"PPO": "tiny_gpt2_ppo.yml", "GRPO": "tiny_gpt2_grpo.yml"}
"""Label -> config."""


def rewards(label: str, seed: int, folder: Path) -> list[float]:
    """Train a run; return the mean reward of each rollout."""
    changes = [f"seed={seed}", f"train_evaluation.n_iters={N_ITERS}", "train_evaluation.save_model=false"]
    config = load_config(CONFIGS / RUNS[label], changes)
    run = train_config(config, base_path_to_store_results=folder, experiment_name=f"{label}_{seed}", quiet=True)
    lines = (run / "rollout_info.jsonl").read_text(encoding="utf-8").splitlines()
    return [round(json.loads(line)["rollout_info/ep_rew"], 4) for line in lines]


def main() -> None:
    """Train all runs and write their curves to `results`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    n_seeds = parser.parse_args().seeds

    curves: dict[str, list[list[float]]] = {label: [] for label in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(n_seeds):
            for label in RUNS:
                curves[label].append(rewards(label, seed, Path(folder)))
                print(label, seed, curves[label][-1][0], curves[label][-1][-1], flush=True)

    results = {"packages": environment("cpu")["packages"], "responses_per_iteration": N_RESPONSES, "rewards": curves}
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
