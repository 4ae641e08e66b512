"""Learning curves over seeds.

    run folders ──key──► one polyline per seed ──on common points──► [n_seeds, n_points] ──► IQM, band

On the axis `iterations`, the points are the iterations that all seeds have. Tokens and seconds differ between seeds.
There the polylines are interpolated at the points of all seeds, within the range that all of them cover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl4lms_like.benchmarking.results import Results
from rl4lms_like.benchmarking.spec import Axis, CurveSpec
from rl4lms_like.benchmarking.statistics import MIN_SEEDS, bootstrap_band, interquartile_mean
from rl4lms_like.tracking.charts import CURVES
from rl4lms_like.tracking.record import RunRecord, number, read_run

N_POINTS = 400
"""Largest number of points of a curve along tokens or seconds."""

DEFAULT_KEYS = ("rollout_info/ep_rew", "rollout_info/kl_div_mean")


@dataclass(frozen=True)
class Line:
    """Curve of one label.

    Args:
        label: label of the runs.
        n_seeds: number of seeds.
        x: positions on the axis, `[n_points]`.
        center: interquartile mean over the seeds, `[n_points]`.
        band: ends of its 95 % bootstrap interval, or of the range below `MIN_SEEDS` seeds; None for one seed.
    """

    label: str
    n_seeds: int
    x: np.ndarray
    center: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None


@dataclass(frozen=True)
class LearningCurves:
    """Plot of learning curves: its entry in the spec, title, vertical label, axis, and the labels that have values."""

    spec: CurveSpec
    title: str
    unit: str
    axis: Axis
    lines: tuple[Line, ...]


def learning_curves(found: Results) -> list[LearningCurves]:
    """Return the plots of the spec. A plot whose key no run has logged has no lines."""
    records = {label: [read_run(folder) for folder in found.folders(label)] for label in found.labels}
    axis, specs = found.benchmark.spec.x, found.benchmark.spec.curves
    if not specs:
        metrics = dict.fromkeys(f"val:{key.partition(':')[2]}" for key in found.metrics)
        specs = [CurveSpec(key=key) for key in (*DEFAULT_KEYS, *metrics)]
    curves = []
    for spec in specs:
        lines = [_line(label, runs, spec.key, axis) for label, runs in records.items()]
        title, unit = _names_of(spec.key)
        there = tuple(line for line in lines if line is not None)
        curves.append(LearningCurves(spec, spec.title or title, unit, axis, there))
    return curves


def _names_of(key: str) -> tuple[str, str]:
    """Return title and unit of a key, as in the run report if it plots the key."""
    for curve in CURVES:
        if any(key in keys for keys in curve.lines.values()):
            return curve.title, curve.note.partition(";")[0]
    split, colon, metric = key.partition(":")
    return (metric, f"mean over the split {split!r}") if colon else (key, key)


def polyline(record: RunRecord, key: str, axis: Axis) -> dict[float, tuple[float, float]]:
    """Return iteration (in supervised runs: optimizer step) -> (position on the axis, value) of finite values."""
    split, colon, metric = key.partition(":")
    values: Mapping[float, Any]
    if colon:
        logged = [line for line in record.iterations if line.get("supervised/epoch")]
        per_epoch = logged[-1]["iteration"] / logged[-1]["supervised/epoch"] if logged else 1.0  # RL: 1 iteration
        evaluations = record.evaluations.get(split, {})
        values = {round(float(epoch) * per_epoch): scores.get(metric) for epoch, scores in evaluations.items()}
    else:
        values = dict(record.curve(key))
    finite = {iteration: value for iteration, raw in values.items() if (value := number(raw)) is not None}
    places = _places(record, axis, list(finite))
    return {iteration: (place, finite[iteration]) for iteration, place in zip(finite, places, strict=True)}


def _places(record: RunRecord, axis: Axis, iterations: Sequence[float]) -> list[float]:
    """Return the positions of iterations on the axis; 0 is before training."""
    if axis == "iterations":
        return [float(iteration) for iteration in iterations]
    logged = [0, *(line["iteration"] for line in record.iterations)]
    if axis == "tokens":
        amounts = [0, *(line.get("timesteps", 0) for line in record.iterations)]
    else:
        seconds = [_seconds(line, n) for line, n in zip(record.iterations, np.diff(logged), strict=True)]
        amounts = [0, *np.cumsum(seconds)]
    return [float(place) for place in np.interp(iterations, logged, amounts)]


def _seconds(line: Mapping[str, Any], n_steps: int) -> float:
    """Return the seconds of an iteration, or in a supervised run of the optimizer steps since the previous line."""
    if rate := number(line.get("time/steps_per_s")):
        return n_steps / rate
    return number(line.get("time/iteration_s")) or 0.0


def _line(label: str, records: Sequence[RunRecord], key: str, axis: Axis) -> Line | None:
    seeds = [points for record in records if (points := polyline(record, key, axis))]
    if not seeds:
        return None
    if axis == "iterations":
        common = sorted(set.intersection(*map(set, seeds)))
        x, values = np.array(common, float), np.array([[points[i][1] for i in common] for points in seeds])
    else:
        lines = [np.array([points[i] for i in sorted(points)]) for points in seeds]  # [n, 2] each
        places = np.unique(np.concatenate([line[:, 0] for line in lines]))
        x = places[(places >= max(line[0, 0] for line in lines)) & (places <= min(line[-1, 0] for line in lines))]
        if len(x) > N_POINTS:
            x = x[np.linspace(0, len(x) - 1, N_POINTS).round().astype(int)]
        values = np.array([np.interp(x, line[:, 0], line[:, 1]) for line in lines])
    if not len(x):
        return None
    extent = (values.min(axis=0), values.max(axis=0)) if len(values) > 1 else None
    band = bootstrap_band(values) if len(values) >= MIN_SEEDS else extent
    return Line(label, len(seeds), x, interquartile_mean(values, axis=0), band)
