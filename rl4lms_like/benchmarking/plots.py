"""Plots of learning curves and score intervals as PNG.

The colours are the colour-blind safe palette of Okabe and Ito; after eight lines, dashes are added. Each line is
labelled at its end, in its colour, instead of in a legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from rl4lms_like.benchmarking.curves import LearningCurves, Line
from rl4lms_like.benchmarking.statistics import MIN_SEEDS, Summary
from rl4lms_like.core.disk import take_away
from rl4lms_like.core.errors import import_extra

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9", "#1D2024", "#E69F00")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
INK, SOFT, GRID = "#1d2024", "#656b73", "#e8e7e3"
AXES = {"iterations": "iterations", "tokens": "tokens", "seconds": "seconds of training"}
DPI = 180
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "svg.hashsalt": "rl4lms-like",
}


def plot_curves(curves: LearningCurves, labels: Sequence[str], file: Path) -> Path:
    """Plot learning curves. A label has the same colour in every plot.

    Args:
        curves: the curves to plot.
        labels: all labels of the benchmark, in order; they determine the colours.
        file: PNG file to write.
    """
    with _style():
        return _draw_curves(curves, labels, file)


def plot_scores(
    title: str, summaries: Sequence[tuple[str, Summary, Sequence[float]]], labels: Sequence[str], file: Path
) -> Path:
    """Plot a metric's scores: a point for each seed, a stroke for the interquartile mean, a bar for the interval.

    With fewer than `MIN_SEEDS` seeds the bar is the range.

    Args:
        title: name of the metric.
        summaries: label, summary and scores of each label.
        labels: all labels of the benchmark, in order.
        file: PNG file to write.
    """
    with _style():
        return _draw_scores(title, summaries, labels, file)


def _draw_curves(curves: LearningCurves, labels: Sequence[str], file: Path) -> Path:
    figure, axes = _new(7.2, 3.9)
    is_log = curves.spec.log and any((line.center > 0).any() for line in curves.lines)
    if is_log:
        axes.set_yscale("log")
    ends, unseen = [], []
    for line in curves.lines:
        seen = line.center > 0 if is_log else np.ones(len(line.x), bool)  # a logarithmic axis has no zero
        if seen.any():
            look = _look(labels.index(line.label))
            _draw_line(axes, line, seen, *look)
            ends.append((float(line.center[seen][-1]), line.label, look[0]))
        else:
            unseen.append(line.label)
    for name, value in curves.spec.lines.items():
        if value > 0 or not is_log:
            axes.axhline(value, color=SOFT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
            ends.append((float(value), name, SOFT))
    if curves.axis == "tokens":
        _short_numbers(axes.xaxis)
    axes.set_title(curves.title, pad=10)
    axes.set_xlabel(AXES[curves.axis], loc="left")
    axes.set_ylabel(curves.unit)
    axes.margins(x=0.0, y=0.07)
    if curves.axis == "iterations":
        axes.xaxis.get_major_locator().set_params(integer=True)
    _name_ends(figure, axes, ends)
    note = f"\nnot above 0: {', '.join(unseen)}" if unseen else ""
    _caption(axes, _seeds_text([line.n_seeds for line in curves.lines]) + note)
    return _save(figure, file)


def _draw_line(axes: Any, line: Line, seen: np.ndarray, colour: str, dashes: Any) -> None:
    """Draw the curve and band of one label at the visible points."""
    if line.band is not None:
        axes.fill_between(line.x, *line.band, where=seen, color=colour, alpha=0.15, linewidth=0)
    center = np.where(seen, line.center, np.nan)
    marker = "o" if seen.sum() <= 2 else None
    axes.plot(line.x, center, color=colour, linestyle=dashes, linewidth=1.8, marker=marker, markersize=4)


def _draw_scores(
    title: str, summaries: Sequence[tuple[str, Summary, Sequence[float]]], labels: Sequence[str], file: Path
) -> Path:
    figure, axes = _new(7.2, 1.15 + 0.42 * len(summaries))
    for row, (label, summary, scores) in enumerate(summaries):
        colour, _ = _look(labels.index(label))
        spread = _jitter(len(scores))
        axes.scatter(scores, row + spread, s=16, color=colour, alpha=0.35, linewidth=0, zorder=2)
        extent = summary.iqm_interval or summary.range
        axes.plot(extent, [row, row], color=colour, linewidth=5, alpha=0.45, solid_capstyle="butt")
        axes.plot([summary.iqm] * 2, [row - 0.24, row + 0.24], color=colour, linewidth=2.4, zorder=3)
    axes.set_yticks(range(len(summaries)), [label for label, _, _ in summaries])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(summaries) - 0.45, -0.55)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.05)
    axes.set_title(title, pad=10)
    _caption(axes, f"stroke: IQM over seeds; bar: {_extent([summary.n for _, summary, _ in summaries])}; points: seeds")
    return _save(figure, file)


def _new(width: float, height: float) -> tuple[Any, Any]:
    """Create a figure and its axes without pyplot, which would keep them in memory and may need a display."""
    figures = import_extra("matplotlib.figure", extra="benchmark", needed_by="a plot")
    figure = figures.Figure(figsize=(width, height), dpi=DPI)
    return figure, figure.add_subplot()


def _style() -> AbstractContextManager[None]:
    """Return a context manager that applies our matplotlib settings."""
    matplotlib = import_extra("matplotlib", extra="benchmark", needed_by="a plot")
    style: AbstractContextManager[None] = matplotlib.rc_context(STYLE)
    return style


def _save(figure: Any, file: Path) -> Path:
    take_away(file)
    figure.savefig(file, bbox_inches="tight", pad_inches=0.12, facecolor="white", metadata={"Software": None})
    return file


def _look(position: int) -> tuple[str, Any]:
    return COLOURS[position % len(COLOURS)], DASHES[position // len(COLOURS) % len(DASHES)]


def _short_numbers(axis: Any) -> None:
    """Format ticks as `120k` instead of `1.2` with an offset of `1e5`."""
    ticker = import_extra("matplotlib.ticker", extra="benchmark", needed_by="a plot")
    axis.set_major_formatter(ticker.EngFormatter(sep=""))


def _name_ends(figure: Any, axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Label the lines at their right ends. Labels that would overlap are moved apart."""
    figure.draw_without_rendering()
    bottom, top = axes.bbox.y0, axes.bbox.y1
    height = 10.5 / 72 * figure.dpi
    wanted = [(float(axes.transData.transform((0, value))[1]), name, colour) for value, name, colour in ends]
    wanted.sort()
    places = _apart([place for place, _, _ in wanted], height, bottom, top)
    for place, (_, name, colour) in zip(places, wanted, strict=True):
        y = (place - bottom) / (top - bottom)
        axes.text(1.012, y, name, transform=axes.transAxes, color=colour, va="center", fontsize=9, clip_on=False)


def _apart(places: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Move sorted positions at least `distance` apart, with the smallest squared shifts (isotonic regression)."""
    groups: list[list[float]] = []  # [sum of the wanted positions, number of members]
    for position in places:
        groups.append([position, 1.0])
        while len(groups) > 1 and _start(groups[-2], distance) + groups[-2][1] * distance > _start(
            groups[-1], distance
        ):
            total, n = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += n
    spread = [_start(group, distance) + i * distance for group in groups for i in range(int(group[1]))]
    shift = max(0.0, low - spread[0]) if spread else 0.0
    shift = min(shift, high - spread[-1]) if spread and spread[-1] + shift > high > spread[-1] else shift
    return [place + shift for place in spread]


def _start(group: Sequence[float], distance: float) -> float:
    """Return the first position of a group whose mean equals the mean of the wanted positions."""
    total, n = group
    return total / n - (n - 1) / 2 * distance


def _jitter(n: int) -> np.ndarray:
    """Return small fixed offsets that separate equal scores."""
    return np.linspace(-0.12, 0.12, n) if n > 1 else np.zeros(n)


def _seeds_text(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    seeds = f"{low} seed{'s' if low != 1 else ''}" if low == high else f"{low} to {high} seeds"
    return f"line: IQM over {seeds}; band: {_extent(counts)}" if high > 1 else "one seed"


def _extent(counts: Sequence[int]) -> str:
    """Describe what bars and bands show for these numbers of seeds."""
    if max(counts) < MIN_SEEDS:
        return "lowest to highest"
    few = f", below {MIN_SEEDS} seeds lowest to highest" if min(counts) < MIN_SEEDS else ""
    return f"its 95 % bootstrap interval{few}"


def _caption(axes: Any, text: str) -> None:
    """Add a small right-aligned text below the plot."""
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(text, (1, 0), (0, -25), fontsize=8, color=SOFT, annotation_clip=False, **place)
