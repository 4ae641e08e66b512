"""Time of training on kept rollouts, relative to the time of update and scoring in the run that kept them.

    python -m benchmarks.replay_time                # three runs of film opinions and two replays of each

Each run is replayed under its own config (stored log-probs) and under another learning rate (scored again). Times are
CPU seconds of one thread, so that other processes on the machine do not matter.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from rl4lms_like.config.load import load_config
from rl4lms_like.run import train_config

CONFIGS = Path(__file__).parents[1] / "task_configs" / "film_opinions"
RESULTS = Path(__file__).parent / "results" / "replay_time.json"
A2C = ["alg.id=a2c", "alg.args={n_steps: 5, learning_rate: 2.0e-4, gamma: 1.0}"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "ppo": ("tiny_gpt2_ppo.yml", []),
    "nlpo": ("tiny_gpt2_nlpo.yml", []),
    "a2c": ("tiny_gpt2_ppo.yml", A2C),
}
SCHEDULE = ["eval_every=1000", "max_eval_samples=1", "n_credit_episodes=0"]


def main() -> None:
    """Run the measurement and write its results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n_iters", type=int, default=10, help="of each run (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    time.perf_counter = time.process_time  # the clock of the logged times
    schedule = [f"train_evaluation.{value}" for value in [*SCHEDULE, f"n_iters={options.n_iters}"]]
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "n_iters": options.n_iters}
    for name, (file, overrides) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:

            def seconds(*more: str, file: str = file, overrides: list[str] = overrides, folder: str = folder) -> Any:
                config = load_config(CONFIGS / file, [*overrides, *schedule, *more])
                run = train_config(config, base_path_to_store_results=folder, quiet=True, new=True)
                return run, totals(run)

            run, original = seconds("train_evaluation.save_rollouts=true")
            results[name] = {"update and scoring": round(original["update_s"] + original["score_s"], 3)}
            replay = f'train_evaluation.replay="{run}"'
            for label, more in (("stored log-probs", []), ("scored again", ["alg.args.learning_rate=1.0e-4"])):
                results[name][label] = seconds(replay, *more)[1]["iteration_s"]
            results[name]["whole run"] = original["iteration_s"]
        print(name, json.dumps(results[name]), flush=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def totals(run: Path) -> dict[str, float]:
    """Return the sums of a run's logged times, in seconds."""
    lines = [json.loads(line) for line in (run / "rollout_info.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        name: round(sum(line[f"time/{name}"] for line in lines), 3) for name in ("update_s", "score_s", "iteration_s")
    }


if __name__ == "__main__":
    main()
