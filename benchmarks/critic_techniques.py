"""Measures which techniques for critics raise the reward at equal CPU time: tiny models, ten seeds, one thread.

    python -m benchmarks.critic_techniques --cells today,pretraining,lambdas,adaptive,epochs,nll --seeds 0-4
    python -m benchmarks.critic_techniques --best pretraining,epochs        # chosen from seeds 0-4, run on all seeds
    python -m benchmarks.critic_techniques --table                          # print the table of the results file

Each cell is the task's config with one technique. Its number of iterations is chosen so that the run, including the
pretraining of the critic, takes as much CPU time as the config as it is: the costs are the medians of three
calibration runs per cell, which alternate between the cells. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from stable_baselines3.common.logger import Logger

from benchmarks.hyperparameters import half_width
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.on_policy.assemble import assemble

CONFIGS = Path(__file__).parents[1] / "task_configs"
RESULTS = Path(__file__).parent / "results" / "critic_techniques.json"

TASKS: dict[str, tuple[str, float, float]] = {
    "numbers": ("synthetic_generate_increasing_numbers/tiny_gpt2_ppo.yml", 0.9, 0.7),
    "sentiment": ("film_opinions/tiny_gpt2_ppo.yml", 0.8, 0.7),
    "reasoning": ("reasoning/tiny_spell_backward_ppo.yml", 1.0, 0.6),
}
"""Task -> config, reward of a good episode for the negative log-likelihood, and reward until which time is measured."""

TECHNIQUES: dict[str, dict[str, Any]] = {
    "pretraining": {"alg.args.critic_pretrain": {}},
    "lambdas": {"alg.args.value_gae_lambda": 1.0},
    "adaptive": {"alg.args.gae_length_alpha": 1.0},
    "epochs": {"alg.args.critic_epochs": 8},
    "nll": {"alg.args.nll_coef": 0.1},
}
N_CALIBRATION = 3
KEYS = {
    "reward": "rollout_info/ep_rew",
    "kl": "rollout_info/kl_div_mean",
    "explained_variance": "ppo/explained_variance",
}


def changes_of(task: str, cell: str) -> dict[str, Any]:
    """Return the changes of a cell (`today`, a technique, or several joined by +) to the config of a task."""
    techniques = [] if cell == "today" else cell.split("+")
    changes = {key: value for technique in techniques for key, value in TECHNIQUES[technique].items()}
    return changes | ({"alg.args.nll_threshold": TASKS[task][1]} if "nll" in techniques else {})


def run(task: str, cell: str, seed: int, n_iters: int | None) -> dict[str, list[float]]:
    """Train a cell; return what each iteration logged, and its CPU seconds (index 0: the pretraining).

    With `n_iters=None`, five iterations are run of the task's own number, to measure their cost.
    """
    blocks = yaml.safe_load((CONFIGS / TASKS[task][0]).read_text())
    total = n_iters or blocks["train_evaluation"]["n_iters"]
    changes = {**changes_of(task, cell), "seed": seed, "train_evaluation.n_iters": total}
    blocks, issues = apply_values(blocks, changes, "cell")
    config = parse_config(blocks, issues=issues)
    assert isinstance(config, RunConfig)
    algorithm: Any = assemble(config).algorithm
    algorithm.set_logger(Logger(None, []))
    curves: dict[str, list[float]] = {name: [] for name in KEYS}
    start = time.process_time()
    if algorithm.pretraining is not None:
        list(algorithm.pretrain_critic())
    seconds = [round(time.process_time() - start, 3)]
    for iteration in range(n_iters or 5):
        start = time.process_time()
        algorithm.learn_iteration(iteration, total)
        seconds.append(round(time.process_time() - start, 3))
        for name, key in KEYS.items():
            curves[name].append(round(float(algorithm.logger.name_to_value.get(key, float("nan"))), 5))
        algorithm.logger.name_to_value.clear()
        algorithm.update_progress = None
    return {**curves, "cpu_s": seconds}


def calibrate(task: str, cells: list[str], kept: dict[str, Any]) -> None:
    """Measure the costs of cells that were not measured yet, next to those of `today`."""
    costs = kept.setdefault("costs", {}).setdefault(task, {})
    new = [cell for cell in cells if cell not in costs]
    if not new:
        return
    measured: dict[str, list[list[float]]] = {cell: [] for cell in dict.fromkeys(["today", *new])}
    for index in range(N_CALIBRATION):
        for cell, found in measured.items():
            found.append(run(task, cell, 100 + index, None)["cpu_s"])
    base = statistics.median(second for found in measured["today"] for second in found[1:])
    for cell in new:
        before = statistics.median(found[0] for found in measured[cell])
        each = statistics.median(second for found in measured[cell] for second in found[1:])
        costs[cell] = {"pretraining": before / base, "iteration": each / base}


def iterations(task: str, cell: str, kept: dict[str, Any]) -> int:
    """Return the number of iterations that take as much CPU time as the task's config as it is."""
    n_iters = yaml.safe_load((CONFIGS / TASKS[task][0]).read_text())["train_evaluation"]["n_iters"]
    cost = kept["costs"][task][cell]
    return max(round((n_iters - cost["pretraining"]) / cost["iteration"]), 1) if cell != "today" else n_iters


def seconds_until(reward: float, run: dict[str, list[float]]) -> float:
    """Return the CPU seconds, including the pretraining, until an iteration has this mean reward; infinite if none."""
    seconds = run["cpu_s"][0]
    for reached, added in zip(run["reward"], run["cpu_s"][1:], strict=True):
        seconds += added
        if reached >= reward:
            return seconds
    return math.inf


def table(kept: dict[str, Any]) -> list[str]:
    """Return the rows of the table: means and half 95 % intervals over seeds."""
    rows = [
        "| task | cell | seeds | iterations | CPU s | reward, last five | seeds 5-9 | CPU s until a reward | KL | "
        "explained variance, it. 1 |"
    ]
    rows.append("|" + "---|" * 10)

    def mean(values: list[float]) -> str:
        known = [value for value in values if math.isfinite(value)]  # no KL is measured without a reference
        return f"{statistics.fmean(known):.3f} ± {half_width(known):.3f}" if known else ""

    for task, cells in kept["runs"].items():
        for cell, runs in cells.items():
            last = {int(seed): statistics.fmean(found["reward"][-5:]) for seed, found in runs.items()}
            seconds = statistics.fmean(sum(found["cpu_s"]) for found in runs.values())
            rows.append(
                f"| {task} | {cell} | {len(runs)} | {len(next(iter(runs.values()))['reward'])} | {seconds:.1f} | "
                f"{mean(list(last.values()))} | {mean([reward for seed, reward in last.items() if seed > 4])} | "
                f"{mean([seconds_until(TASKS[task][2], found) for found in runs.values()])} ({TASKS[task][2]}) | "
                f"{mean([statistics.fmean(found['kl'][-5:]) for found in runs.values()])} | "
                f"{mean([found['explained_variance'][0] for found in runs.values()])} |"
            )
    return rows


def parsed(parser: argparse.ArgumentParser, seeds: str, output: Path) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Add the options of a program that keeps its finished runs; return all options, and the runs so far.

    Args:
        parser: with the program's other options.
        seeds: default of the first and last seed.
        output: default of the file of results.
    """
    parser.add_argument("--seeds", default=seeds, help="first and last seed (default %(default)s)")
    parser.add_argument("--table", action="store_true", help="print the results and end")
    parser.add_argument("--output", type=Path, default=output)
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {"runs": {}}
    return options, kept


def main() -> None:
    """Run the cells that are asked for, and keep their curves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--cells", default=",".join(["today", *TECHNIQUES]))
    parser.add_argument("--best", help="techniques of the best combination; run on its own")
    options, kept = parsed(parser, "0-9", RESULTS)
    torch.set_num_threads(1)
    if options.table:
        print("\n".join(table(kept)))
        return
    first, last = map(int, options.seeds.split("-"))
    cells = [options.best.replace(",", "+")] if options.best else options.cells.split(",")
    for task in options.tasks.split(","):
        calibrate(task, cells, kept)
        for seed in range(first, last + 1):
            for cell in cells:
                runs = kept["runs"].setdefault(task, {}).setdefault(cell, {})
                if str(seed) in runs:
                    continue
                runs[str(seed)] = run(task, cell, seed, iterations(task, cell, kept))
                reward = statistics.fmean(runs[str(seed)]["reward"][-5:])
                print(
                    f"{task} {cell} seed {seed}: {len(runs[str(seed)]['reward'])} iterations, {reward:.3f}", flush=True
                )
                options.output.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
