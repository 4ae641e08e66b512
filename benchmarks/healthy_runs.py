"""How often the run doctor cries wolf: ten runs that learn what they are asked to, with its defaults.

    python -m benchmarks.healthy_runs                                # ten runs, about ten minutes on two cores
    python -m benchmarks.healthy_runs --runs trpo/seq2seq --seed 7

PPO, NLPO, A2C and TRPO on a causal and a seq2seq model learn numbers that grow; PPO and NLPO learn kind film opinions
at a KL budget. Each run has a seed of its own. A check is one alarm looked at after one iteration, or after one
evaluation on `val`; the rate is of checks in which an alarm held. Every alarm is listed with what it said: healthy runs
should have none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "healthy_runs.json"
NUMBERS = "task_configs/synthetic_generate_increasing_numbers/tiny_{family}_{algorithm}.yml"
FILMS = "task_configs/film_opinions/tiny_gpt2_{algorithm}.yml"
FAMILIES = {"causal": "gpt2", "seq2seq": "t5"}

RUNS = {
    f"{algorithm}/{name}": NUMBERS.format(family=family, algorithm=algorithm)
    for algorithm in ("ppo", "nlpo", "a2c", "trpo")
    for name, family in FAMILIES.items()
} | {f"{algorithm}/films": FILMS.format(algorithm=algorithm) for algorithm in ("ppo", "nlpo")}
"""Name -> config."""


def train(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run in a process of its own; what its doctor said."""
    experiment = name.replace("/", "_")
    command = [sys.executable, "-m", "rl4lms_like", "train", str(ROOT / RUNS[name]), "--experiment_name", experiment]
    for override in (f"seed={seed}", "train_evaluation.save_model=false"):
        command += ["--set", override]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {"config": RUNS[name], "seed": seed, **what_was_said(folder / "rl4lm_exps" / experiment)}


def what_was_said(run: Path) -> dict[str, Any]:
    """Iterations, evaluations, alarms and the checks in which one held, from a run's folder."""
    from rl4lms_like.on_policy.doctor.alerts import ALERTS

    def lines(file: str) -> list[dict[str, Any]]:
        path = run / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    updates, rollouts = lines("training_info.jsonl"), lines("rollout_info.jsonl")
    evaluations = lines("val_split_metrics.jsonl")
    held = sum(value for line in updates for key, value in line.items() if key.startswith("doctor/"))
    alarms = [{key: line[key] for key in ("alarm", "iteration", "said")} for line in lines("alarms.jsonl")]
    return {
        "iterations": len(updates),
        "evaluations": len(evaluations),
        "checks": len(updates) * len(ALERTS) + len(evaluations),
        "checks_with_alarm": max(held, len(alarms)),
        "alarms": alarms,
        "reward": [round(rollouts[index]["rollout_info/ep_rew"], 3) for index in (0, -1)],
    }


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Over all runs."""
    checks = sum(run["checks"] for run in runs.values())
    held = sum(run["checks_with_alarm"] for run in runs.values())
    return {
        "runs": len(runs),
        "runs_with_alarm": sum(bool(run["alarms"]) for run in runs.values()),
        "alarms_per_run": sum(len(run["alarms"]) for run in runs.values()) / len(runs),
        "iterations": sum(run["iterations"] for run in runs.values()),
        "checks": checks,
        "checks_with_alarm": held,
        "share_of_checks": held / checks,
    }


def main() -> int:
    """Runs them all, prints a line each, writes the results; 1 if any run had an alarm."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated, of " + ", ".join(RUNS))
    parser.add_argument("--seed", type=int, default=200, help="of the first run; each has the next (%(default)s)")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.runs.split(",")
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def run(index: int) -> None:
            name = names[index]
            runs[name] = train(name, options.seed + index, Path(folder))
            print(name, json.dumps(runs[name]), flush=True)

        with ThreadPoolExecutor(options.parallel) as pool:
            for future in as_completed([pool.submit(run, index) for index in range(len(names))]):
                if error := future.exception():
                    pool.shutdown(cancel_futures=True)
                    raise SystemExit(str(error))
    found = summary(runs)
    print(json.dumps(found))
    document = {"summary": found, "runs": {name: runs[name] for name in names}}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    return int(found["runs_with_alarm"] > 0)


if __name__ == "__main__":
    sys.exit(main())
