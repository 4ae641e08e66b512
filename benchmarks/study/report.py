"""Tables, pictures and samples of the study, from the files of its results.

study_<task>_kl.svg       rollouts of the runs with a reward: mean reward against KL, one line for each arm; points:
                          models that were trained on given texts, on held-out prompts
study_<task>_time.svg     the same rewards against CPU minutes
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.hyperparameters import half_width
from scripts.docs.charts import Curve, Point, curves_picture

TIME, MINUTES = "CPU hours", "CPU minutes"
ROLLOUT_REWARD, ROLLOUT_KL, SAMPLES = "reward of rollouts", "KL of rollouts", "samples"
LISTS = (ROLLOUT_REWARD, ROLLOUT_KL, SAMPLES)
"""Results that are no single number."""

WINDOW = 4
"""Iterations of which pictures show the mean."""
SHORT = {"PPO shared critic": "shared critic", "DPO on sampled pairs": "DPO", "SFT on the best of 8": "SFT"}
"""Name of an arm -> that in pictures."""


def write_report(results: Path, folder: Path) -> Path:
    """Write `report.md` and the pictures into a folder; return the path of the report."""
    drawn = dict(pictures(results))
    for name, content in drawn.items():
        (folder / name).write_text(content, encoding="utf-8")

    lines = ["# Study"]
    for task in tasks_of(results):
        arms = arms_of(task)
        shown = [f"![]({name})" for name in drawn if name.startswith(f"study_{task.name}_")]
        lines += ["", f"## {task.name}", "", *table(arms), "", *shown, *samples(arms)]
    report = folder / "report.md"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return report


def tasks_of(results: Path) -> list[Path]:
    """Return the folders of the tasks with results."""
    return sorted({path.parent.parent for path in results.glob("*/*/seed_*.json")})


def arms_of(task: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the results of all seeds of each arm, by its name.

    The initial model is first, then runs with a reward, runs on given texts, and other samplings of the initial model.
    """
    arms = {arm.name.replace("_", " "): results_of(arm) for arm in sorted(task.iterdir())}

    def kind(name: str) -> tuple[bool, bool, bool]:
        numbers = arms[name][0]
        return (name != "start", ROLLOUT_REWARD not in numbers, numbers[TIME] == 0.0)

    return {name: arms[name] for name in sorted(arms, key=kind)}


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
    mean = fmean(values)
    digits = 1 if mean >= 10.0 else 2
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {half_width(list(values)):.{digits}f}"


def samples(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield three responses of each arm's first seed; prompt and response have a bar between them."""
    for name, seeds in arms.items():
        shown = seeds[0].get(SAMPLES, [])[:3]
        if shown:
            yield f"\n{name}:\n"
            yield from (f"* {' '.join(text.split())}" for text in shown)


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(results: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each picture's file and its content."""
    for task in tasks_of(results):
        arms = arms_of(task)
        curves = {name: list(map(curves_of, seeds)) for name, seeds in arms.items() if ROLLOUT_REWARD in seeds[0]}
        if not curves:
            continue
        n_seeds = min(map(len, curves.values()))

        # The best reward of a task may be above 1.
        low = min(0.0, *(min(seed[ROLLOUT_REWARD]) for seeds in curves.values() for seed in seeds))
        high = max(1.0, *(max(seed[ROLLOUT_REWARD]) for seeds in curves.values() for seed in seeds))
        subtitle = f"means of {WINDOW} rollouts, {n_seeds} seed{'s' if n_seeds > 1 else ''}"
        for key, x_name, title in (
            (ROLLOUT_KL, "KL to the initial model, nats per token", f"{task.name}: reward against KL"),
            (MINUTES, "CPU minutes", f"{task.name}: reward against time"),
        ):
            lines = [mean_curve(name, seeds, key) for name, seeds in curves.items()]
            points = list(given_texts(arms, key))
            yield (
                f"study_{task.name}_{'kl' if key == ROLLOUT_KL else 'time'}.svg",
                curves_picture(title[0].upper() + title[1:], subtitle, x_name, lines, (low, high), points),
            )


def curves_of(numbers: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return rewards, KLs and CPU minutes of the iterations of a run with a reward."""
    # Only the CPU time of the whole run is known; iterations take about equally long.
    n_iters = len(numbers[ROLLOUT_REWARD])
    times = [60 * numbers[TIME] * (i + 1) / n_iters for i in range(n_iters)]
    return {ROLLOUT_REWARD: numbers[ROLLOUT_REWARD], ROLLOUT_KL: numbers[ROLLOUT_KL], MINUTES: times}


def mean_curve(name: str, seeds: Sequence[Mapping[str, Sequence[float]]], key: str) -> Curve:
    """Return the line of an arm: means over seeds and `WINDOW` iterations of the reward and of another number."""
    numbers = []
    for wanted in (key, ROLLOUT_REWARD):
        values = [fmean(of_iteration) for of_iteration in zip(*(seed[wanted] for seed in seeds), strict=True)]
        numbers.append([fmean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)])
    return Curve(SHORT.get(name, name), *numbers)


def given_texts(arms: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> Iterator[Point]:
    """Yield the points of arms that train without rollouts: the reward of their models on held-out prompts."""
    for name, seeds in arms.items():
        if ROLLOUT_REWARD in seeds[0] or seeds[0][TIME] == 0.0:
            continue
        x = fmean(60 * numbers[TIME] if key == MINUTES else numbers["KL"] for numbers in seeds)
        yield Point(SHORT.get(name, name), x, fmean(numbers["reward"] for numbers in seeds))
