"""Tables, pictures and samples of the study, from the files of its runs.

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

REWARD, KL, TIME = "rollout_info/ep_rew", "rollout_info/kl_div_mean", "CPU hours"


def write_report(results: Path) -> Path:
    """Write `report.md` and the pictures; return its path."""
    lines = ["# Study"]
    for task in sorted(path for path in results.iterdir() if path.is_dir() and list(path.glob("*/seed_*"))):
        arms = {arm.name: seeds for arm in sorted(task.iterdir()) if (seeds := measured_seeds(arm))}
        if not arms:
            continue
        lines += ["", f"## {task.name}", "", *table(arms), "", *pictures(task, results), *samples(arms)]
    report = results / "report.md"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return report


def measured_seeds(arm: Path) -> list[dict[str, Any]]:
    """Return the numbers of each seed of an arm that is finished."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(arm.glob("seed_*/measured.json"))]


def table(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the lines of a table with a row for each arm: means over seeds, with half of the 95 % interval."""
    columns = dict.fromkeys(key for seeds in arms.values() for key in seeds[0] if key != "samples")
    yield f"| | seeds | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 2) + "|"
    for name, seeds in arms.items():
        cells = [with_interval([numbers[key] for numbers in seeds if key in numbers]) for key in columns]
        yield f"| {name.replace('_', ' ')} | {len(seeds)} | {' | '.join(cells)} |"


def with_interval(values: Sequence[float]) -> str:
    """Return the mean of one number over seeds, with half of its 95 % interval; empty without values."""
    if not values:
        return ""
    mean = f"{fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {half_width(list(values)):.3f}"


def samples(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield three responses of each arm's first seed; prompt and response have a bar between them."""
    for name, seeds in arms.items():
        shown = seeds[0].get("samples", [])[:3]
        if shown:
            yield f"\n{name.replace('_', ' ')}:\n"
            yield from (f"* {' '.join(text.split())}" for text in shown)


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(task: Path, results: Path) -> Iterator[str]:
    """Draw the pictures of a task; yield the lines that show them."""
    curves = {arm.name.replace("_", " "): curves_of(arm) for arm in sorted(task.iterdir())}
    curves = {name: of_seeds for name, of_seeds in curves.items() if of_seeds}
    if not curves:
        return
    for name, key, label in (("kl", KL, "KL to the start, nats per token"), ("time", TIME, "CPU hours")):
        file = f"reward_and_{name}_{task.name}.svg"
        draw(results / file, curves, key, label)
        yield f"![Reward of the rollouts of {', '.join(curves)} against {label}]({file})"


def curves_of(arm: Path) -> list[dict[str, list[float]]]:
    """Return for each seed of an arm with a reward: rewards, KLs and CPU hours of its iterations."""
    curves = []
    for seed in sorted(arm.glob("seed_*")):
        rollouts = seed / "rl4lm_exps" / "run" / "rollout_info.jsonl"
        if not rollouts.is_file() or not (seed / "measured.json").is_file():
            continue
        rows = [json.loads(line) for line in rollouts.read_text(encoding="utf-8").splitlines()]
        if REWARD not in rows[0]:
            continue
        hours = json.loads((seed / "measured.json").read_text(encoding="utf-8"))["CPU hours"]

        # Only the CPU time of the whole run is known; iterations take about equally long.
        times = [hours * (i + 1) / len(rows) for i in range(len(rows))]
        curves.append({REWARD: [row[REWARD] for row in rows], KL: [row[KL] for row in rows], TIME: times})
    return curves


def draw(path: Path, curves: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], key: str, label: str) -> None:
    """Draw a line for each arm: means over seeds of the reward and of another number, iteration by iteration."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, seeds in curves.items():
        points = [
            (fmean(seed[key][i] for seed in seeds), fmean(seed[REWARD][i] for seed in seeds))
            for i in range(min(len(seed[REWARD]) for seed in seeds))
        ]
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("reward of the rollouts")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
