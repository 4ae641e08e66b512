"""Tables, pictures and samples of the study, from the files of its results.

reward_and_kl_<task>.svg       rollouts of the runs with a reward: mean reward against KL, one line for each arm
reward_and_time_<task>.svg     the same rewards against CPU hours
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.hyperparameters import half_width

TIME = "CPU hours"
ROLLOUT_REWARD, ROLLOUT_KL, SAMPLES = "reward of rollouts", "KL of rollouts", "samples"
LISTS = (ROLLOUT_REWARD, ROLLOUT_KL, SAMPLES)
"""Results that are no single number."""


def write_report(results: Path) -> Path:
    """Write `report.md` and the pictures; return its path."""
    lines = ["# Study"]
    for task in sorted({path.parent.parent for path in results.glob("*/*/seed_*.json")}):
        arms = {arm.name.replace("_", " "): results_of(arm) for arm in sorted(task.iterdir())}
        lines += ["", f"## {task.name}", "", *table(arms), "", *pictures(task.name, arms, results), *samples(arms)]
    report = results / "report.md"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return report


def results_of(arm: Path) -> list[dict[str, Any]]:
    """Return the results of each seed of an arm."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(arm.glob("seed_*.json"))]


def table(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table with a row for each arm: means over seeds, with half of the 95 % interval."""
    columns = dict.fromkeys(key for seeds in arms.values() for key in seeds[0] if key not in LISTS)
    yield f"| | seeds | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 2) + "|"
    for name, seeds in arms.items():
        cells = [with_interval([numbers[key] for numbers in seeds if key in numbers]) for key in columns]
        yield f"| {name} | {len(seeds)} | {' | '.join(cells)} |"


def with_interval(values: Sequence[float]) -> str:
    """Return the mean of one number over seeds, with half of its 95 % interval; empty without values."""
    if not values:
        return ""
    mean = f"{fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {half_width(list(values)):.3f}"


def samples(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield three responses of each arm's first seed; prompt and response have a bar between them."""
    for name, seeds in arms.items():
        shown = seeds[0].get(SAMPLES, [])[:3]
        if shown:
            yield f"\n{name}:\n"
            yield from (f"* {' '.join(text.split())}" for text in shown)


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(task: str, arms: Mapping[str, Sequence[Mapping[str, Any]]], results: Path) -> Iterator[str]:
    """Draw the pictures of a task; yield the lines that show them."""
    curves = {name: list(map(curves_of, seeds)) for name, seeds in arms.items() if ROLLOUT_REWARD in seeds[0]}
    if not curves:
        return
    for name, key, label in (("kl", ROLLOUT_KL, "KL to the start, nats per token"), ("time", TIME, TIME)):
        file = f"reward_and_{name}_{task}.svg"
        draw(results / file, curves, key, label)
        yield f"![Reward of the rollouts of {', '.join(curves)} against {label}]({file})"


def curves_of(numbers: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return rewards, KLs and CPU hours of the iterations of a run with a reward."""
    # Only the CPU time of the whole run is known; iterations take about equally long.
    n_iters = len(numbers[ROLLOUT_REWARD])
    times = [numbers[TIME] * (i + 1) / n_iters for i in range(n_iters)]
    return {ROLLOUT_REWARD: numbers[ROLLOUT_REWARD], ROLLOUT_KL: numbers[ROLLOUT_KL], TIME: times}


def draw(path: Path, curves: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], key: str, label: str) -> None:
    """Draw a line for each arm: means over seeds of the reward and of another number, iteration by iteration."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, seeds in curves.items():
        points = [
            (fmean(seed[key][i] for seed in seeds), fmean(seed[ROLLOUT_REWARD][i] for seed in seeds))
            for i in range(min(len(seed[ROLLOUT_REWARD]) for seed in seeds))
        ]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("reward of the rollouts")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
