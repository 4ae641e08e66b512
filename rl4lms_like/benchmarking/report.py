"""Report of a benchmark, `report.html`: one file that needs neither network nor scripts.

    Results ──► tables, PNGs in figures/ ──report.html.j2──► report.html      the PNGs are embedded in the page

    run folders ──key──► one polyline per seed ──on common points──► [n_seeds, n_points] ──► IQM, band

Along `iterations`, the points of a learning curve are the iterations that all seeds have. Tokens and seconds differ
between seeds. There the polylines are interpolated at the points of all seeds, within the range that all of them cover.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rl4lms_like.benchmarking.jobs import STATE_TEXTS, last_lines, state_of
from rl4lms_like.benchmarking.results import FEW_SEEDS, HEADINGS, Results, interval_text, scores_of
from rl4lms_like.benchmarking.spec import Axis, CurveSpec
from rl4lms_like.benchmarking.statistics import (
    MIN_SEEDS,
    Summary,
    bootstrap_band,
    interquartile_mean,
    interval_over_seeds,
    probability_of_improvement,
)
from rl4lms_like.config.yaml_file import dump_yaml
from rl4lms_like.system.disk import remove_path
from rl4lms_like.system.errors import import_extra
from rl4lms_like.tracking.charts import CURVES, format_number
from rl4lms_like.tracking.record import RunRecord, number, read_run
from rl4lms_like.tracking.report import template_of
from rl4lms_like.tracking.run_folder import REPORT_FILE, write_whole

N_POINTS = 400
"""Largest number of points of a curve along tokens or seconds."""

DEFAULT_KEYS = ("rollout_info/ep_rew", "rollout_info/kl_div_mean")

MAX_COMPARED = 8
"""Largest number of labels for which all pairs are compared."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#56B4E9", "#1D2024", "#E69F00")
"""Colour-blind safe palette of Okabe and Ito; after eight lines, dashes are added."""

DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
INK = "#1d2024"
SOFT = "#656b73"
GRID = "#e8e7e3"
AXES = {"iterations": "iterations", "tokens": "tokens", "seconds": "seconds of training"}
DPI = 180
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), SOFT),
    **dict.fromkeys(("axes.titlecolor", "text.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.fontsize": 9,
}


# --- learning curves --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Curve of one label: positions on the axis and interquartile means over the seeds, `[n_points]` each.

    The band has the ends of the 95 % bootstrap interval, or of the range below `MIN_SEEDS` seeds; None for one seed.
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


def learning_curves(results: Results) -> list[LearningCurves]:
    """Return the plots of the spec. A plot whose key no run has logged has no lines."""
    runs_of: dict[str, list[RunRecord]] = {}
    for label in results.labels:
        runs_of[label] = [read_run(folder) for folder in results.folders(label)]

    # Default: the metrics of the tables, but on `val`, the only split that is evaluated during the training.
    axis = results.benchmark.spec.x
    specs = results.benchmark.spec.curves
    if not specs:
        metrics = dict.fromkeys(f"val:{key.partition(':')[2]}" for key in results.metrics)
        specs = [CurveSpec(key=key) for key in (*DEFAULT_KEYS, *metrics)]

    curves = []
    for spec in specs:
        title, unit = _names_of(spec.key)
        lines = []
        for label, runs in runs_of.items():
            line = _line(label, runs, spec.key, axis)
            if line is not None:
                lines.append(line)
        curves.append(LearningCurves(spec, title=spec.title or title, unit=unit, axis=axis, lines=tuple(lines)))
    return curves


def _names_of(key: str) -> tuple[str, str]:
    """Return title and unit of a key, as in the run report if it plots the key."""
    for curve in CURVES:
        if any(key in keys for keys in curve.lines.values()):
            return curve.title, curve.note.partition(";")[0]
    split, colon, metric = key.partition(":")
    return (metric, f"mean over the split {split!r}") if colon else (key, key)


PASSES = ("supervised/epoch", "preference/epoch")
"""Keys of the number of passes over the examples, by kind of run."""


def polyline(record: RunRecord, key: str, axis: Axis) -> dict[float, tuple[float, float]]:
    """Return iteration (in supervised runs: optimizer step) -> (position on the axis, value) of finite values."""
    # Metrics are logged by epoch: an iteration in RL runs, a pass over the examples (many steps) in the others.
    split, colon, metric = key.partition(":")
    values: dict[float, Any] = {}
    if colon:
        steps_per_epoch = _steps_per_epoch(record)
        for epoch, scores in record.evaluations.get(split, {}).items():
            values[round(float(epoch) * steps_per_epoch)] = scores.get(metric)
    else:
        values = dict(record.curve(key))

    # Without NaN and missing values, between which the line is straight.
    finite: dict[float, float] = {}
    for iteration, raw in values.items():
        value = number(raw)
        if value is not None:
            finite[iteration] = value
    positions = _positions(record, axis, list(finite))
    return dict(zip(finite, zip(positions, finite.values(), strict=True), strict=True))


def _steps_per_epoch(record: RunRecord) -> float:
    """Return the number of logged steps in an epoch, from the last line that has both; 1 for RL runs."""
    for line in reversed(record.iterations):
        for key in reversed(PASSES):
            if line.get(key):
                return line["iteration"] / line[key]
    return 1.0


def _positions(record: RunRecord, axis: Axis, iterations: Sequence[float]) -> list[float]:
    """Return the positions of iterations on the axis; 0 is before training."""
    if axis == "iterations":
        return [float(iteration) for iteration in iterations]

    # Tokens or seconds until the end of each logged iteration; evaluations between two of them are interpolated.
    logged = [0, *(line["iteration"] for line in record.iterations)]
    if axis == "tokens":
        amounts = [0, *(line.get("timesteps", 0) for line in record.iterations)]
    else:
        seconds = [_seconds(line, n_steps) for line, n_steps in zip(record.iterations, np.diff(logged), strict=True)]
        amounts = [0, *np.cumsum(seconds)]
    return np.interp(iterations, logged, amounts).tolist()


def _seconds(line: Mapping[str, Any], n_steps: int) -> float:
    """Return the seconds of an iteration, or in a supervised run of the optimizer steps since the previous line."""
    if rate := number(line.get("time/steps_per_s")):
        return n_steps / rate
    return number(line.get("time/iteration_s")) or 0.0


def _line(label: str, records: Sequence[RunRecord], key: str, axis: Axis) -> Line | None:
    """Return the curve of a label's seeds; None if no seed has values, or no point is common to all."""
    points_of_seeds = [polyline(record, key, axis) for record in records]
    points_of_seeds = [points for points in points_of_seeds if points]
    if not points_of_seeds:
        return None

    lines = []
    for points in points_of_seeds:
        lines.append(np.array([points[iteration] for iteration in sorted(points)]))  # [n, 2]: position, value
    x = _common_positions(points_of_seeds, lines, axis)
    if not len(x):
        return None

    # [n_seeds, n_points]. Whole runs are resampled for the band: the points of one run depend on each other.
    values = np.array([np.interp(x, line[:, 0], line[:, 1]) for line in lines])
    if len(values) >= MIN_SEEDS:
        band = bootstrap_band(values)
    elif len(values) > 1:
        band = (values.min(axis=0), values.max(axis=0))
    else:
        band = None
    return Line(label=label, n_seeds=len(values), x=x, center=interquartile_mean(values, axis=0), band=band)


def _common_positions(
    points_of_seeds: Sequence[Mapping[float, tuple[float, float]]], lines: Sequence[np.ndarray], axis: Axis
) -> np.ndarray:
    """Return the positions `[n_points]` at which all seeds have a value, or one can be interpolated."""
    if axis == "iterations":
        return np.array(sorted(set.intersection(*map(set, points_of_seeds))), float)

    # The positions of all seeds, within the range that all cover: beyond it, fewer seeds would make the mean jump.
    x = np.unique(np.concatenate([line[:, 0] for line in lines]))
    start = max(line[0, 0] for line in lines)
    end = min(line[-1, 0] for line in lines)
    x = x[(x >= start) & (x <= end)]
    if len(x) > N_POINTS:
        x = x[np.linspace(0, len(x) - 1, N_POINTS).round().astype(int)]
    return x


# --- page -------------------------------------------------------------------------------------------------------------


def write_report(results: Results, curves: Sequence[LearningCurves]) -> Path:
    """Write the plots and the page, and return the path of the page."""
    benchmark = results.benchmark
    pictures = []
    for curve in curves:
        if curve.lines:
            name = f"curve_{curve.spec.key}"
            pictures.append(_picture(results, name, curve.title, partial(plot_curves, curve)))

    changes = []
    for cell in benchmark.cells:
        content = dump_yaml(cell.changes).strip() if cell.changes else ""
        changes.append((cell.label, str(cell.config_path), content))

    # All texts are escaped by the template: labels, errors and the spec may contain HTML.
    cost_head, costs = results.cost_rows()
    page = template_of("benchmarking").render(
        name=benchmark.name,
        status=_status(results),
        headings=HEADINGS,
        few_seeds=FEW_SEEDS,
        sections=[_section(results, key) for key in results.metrics],
        pictures=pictures,
        cost_head=cost_head,
        costs=costs,
        missing=list(_missing(results)),
        run_head=["run", "seed", *map(results.heading, results.metrics), "tokens", "seconds", ""],
        runs=list(_runs(results)),
        changes=changes,
        spec=benchmark.text,
        versions=_versions(results),
    )
    path = benchmark.results / REPORT_FILE
    write_whole(path, page)
    return path


def _status(results: Results) -> str:
    """Return the size of the benchmark and its progress: `2 labels × 3 seeds, 4 of 6 runs done`."""
    n_labels = len(results.labels)
    n_seeds = len(results.benchmark.seeds)
    labels = "label" if n_labels == 1 else "labels"
    seeds = "seed" if n_seeds == 1 else "seeds"

    n_jobs = len(results.jobs)
    n_done = len(results.finished)
    runs = f"all {n_jobs} runs done" if n_done == n_jobs else f"{n_done} of {n_jobs} runs done"
    return f"{n_labels} {labels} × {n_seeds} {seeds}, {runs}"


def _missing(results: Results) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, state, folder and last line of output of each run without a result."""
    for job in results.missing:
        state = state_of(job)
        # The output of a run with another config ends with its success.
        output = [] if state == "changed" else last_lines(job.folder, 1)
        yield job.name, STATE_TEXTS[state], str(job.folder), "".join(output)


def _section(results: Results, key: str) -> dict[str, Any]:
    """Return title, picture, table rows and comparisons of one metric."""
    scores: dict[str, list[float]] = {}
    summaries = []
    for label in results.labels:
        if key in results.summaries[label]:
            scores[label] = scores_of(results.of(label), key)
            summaries.append((label, results.summaries[label][key], scores[label]))

    title = results.heading(key)
    picture = None
    if summaries:
        picture = _picture(results, f"scores_{key}", title, partial(plot_scores, title, summaries))
    return {"title": title, "picture": picture, "rows": results.rows(key), "compared": comparisons(scores)}


def comparisons(scores: dict[str, list[float]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return label -> for each label the probability of improvement over it, and its interval.

    The list is empty for one label or more than `MAX_COMPARED`.
    """
    n = len(scores)
    if not 2 <= n <= MAX_COMPARED:
        return []

    # P(a > b) + P(a = b) / 2 and that of (b, a) add up to 1, so each pair is calculated once, and the ends of its
    # interval change their places. Cells on the diagonal stay empty.
    cells = [[("", "")] * n for _ in range(n)]
    for (i, a), (j, b) in itertools.combinations(enumerate(scores.values()), 2):
        probability = float(probability_of_improvement(a, b))
        interval = interval_over_seeds(probability_of_improvement, a, b)
        reverse = None if interval is None else (1 - interval[1], 1 - interval[0])
        cells[i][j] = (f"{probability:.2f}", interval_text(interval, 2))
        cells[j][i] = (f"{1 - probability:.2f}", interval_text(reverse, 2))
    return list(zip(scores, cells, strict=True))


def _picture(results: Results, name: str, title: str, plot: Callable[[Sequence[str], Path], Any]) -> dict[str, str]:
    """Plot into `figures/`, and return the alternative text and the `data:` URL of the image."""
    folder = results.benchmark.results / "figures"
    folder.mkdir(parents=True, exist_ok=True)

    # A key such as `rollout_info/ep_rew` or `val:f1` is no file name.
    file = folder / (re.sub(r"[\W_]", "_", name).strip("_") + ".png")
    plot(results.labels, file)
    return {"title": title, "data": f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"}


def _runs(results: Results) -> Iterator[tuple[list[str], str]]:
    """Yield the table row of each run, and the relative path of its own report."""
    for job in results.jobs:
        result = results.finished.get((job.label, job.seed))
        if result is None:
            continue
        scores = [format_number(result.scores.get(key), 4) for key in results.metrics]
        cells = [job.label, str(job.seed), *scores, format_number(result.tokens), format_number(result.seconds)]

        # Relative and with `/`, so that the links still work in a copy of the folder.
        yield cells, (job.folder / REPORT_FILE).relative_to(results.benchmark.results).as_posix()


def _versions(results: Results) -> list[tuple[str, str]]:
    """Return package -> the versions used by the runs, which may be several after an upgrade."""
    versions_of: dict[str, set[str]] = {}
    for result in results.finished.values():
        for package, version in result.versions.items():
            versions_of.setdefault(package, set()).add(version)
    return [(package, ", ".join(sorted(filter(None, versions)))) for package, versions in versions_of.items()]


# --- plots -----------------------------------------------------------------------------------------------------------


def plot_curves(curves: LearningCurves, labels: Sequence[str], file: Path) -> Any:
    """Plot learning curves as PNG, and return the figure. A label has the same colour in every plot.

    Args:
        curves: the curves to plot.
        labels: all labels of the benchmark, in order; they determine the colours.
        file: PNG file to write.
    """
    # If no value is above 0, the axis stays linear: matplotlib would show an empty plot.
    is_log = curves.spec.log and any((line.center > 0).any() for line in curves.lines)
    names = []  # in the order of `axes.lines`, for the legend
    with _figure(file, height=3.9) as (figure, axes):
        if is_log:
            axes.set_yscale("log")

        # A logarithmic axis has no zero: points that are not above it are gaps. A single point has a marker, no line.
        for line in curves.lines:
            colour, dashes = _colour_and_dashes(labels.index(line.label))
            is_shown = line.center > 0 if is_log else np.ones(len(line.x), bool)  # [n_points]
            marker = "o" if is_shown.sum() <= 2 else None
            center = np.where(is_shown, line.center, np.nan)
            axes.plot(line.x, center, linewidth=1.8, markersize=4, color=colour, linestyle=dashes, marker=marker)
            names.append(line.label if is_shown.any() else f"{line.label}: not above 0")
            if line.band is not None:
                axes.fill_between(line.x, *line.band, where=is_shown, color=colour, alpha=0.15, linewidth=0)

        for name, value in curves.spec.lines.items():
            if value > 0 or not is_log:
                axes.axhline(value, color=SOFT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
                names.append(name)

        _label_axes(axes, curves)
        # Next to the plot, where it hides no line; the names have the lines' colours.
        axes.legend(axes.lines, names, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor="linecolor")
        _caption(axes, _caption_of([line.n_seeds for line in curves.lines]))
        return figure


def _label_axes(axes: Any, curves: LearningCurves) -> None:
    if curves.axis == "tokens":  # ticks as `120k` instead of `1.2` with an offset of `1e5`
        ticker = import_extra("matplotlib.ticker", extra="benchmark", needed_by="a plot")
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    elif curves.axis == "iterations":  # no ticks at 2.5
        axes.xaxis.get_major_locator().set_params(integer=True)

    axes.set_title(curves.title)
    axes.set_xlabel(AXES[curves.axis], loc="left")
    axes.set_ylabel(curves.unit)
    axes.margins(x=0.0, y=0.07)


def _caption_of(counts: Sequence[int]) -> str:
    """Describe line and band of curves with these numbers of seeds."""
    if max(counts) == 1:
        return "one seed"
    seeds = str(counts[0])
    if len(set(counts)) > 1:
        seeds = f"{min(counts)} to {max(counts)}"
    return f"line: IQM over {seeds} seeds; band: {_extent(counts)}"


def plot_scores(
    title: str, summaries: Sequence[tuple[str, Summary, Sequence[float]]], labels: Sequence[str], file: Path
) -> Any:
    """Plot a metric's scores as PNG: a point for each seed, a stroke for the IQM, a bar for its interval or the range.

    Args:
        title: name of the metric.
        summaries: label, summary and scores of each label.
        labels: all labels of the benchmark, in order.
        file: PNG file to write.
    """
    # Inches: the frame, and a row of the same height for each label.
    with _figure(file, height=1.15 + 0.42 * len(summaries)) as (figure, axes):
        for row, (label, summary, scores) in enumerate(summaries):
            colour, _ = _colour_and_dashes(labels.index(label))
            # Points of equal scores would hide each other, so they are spread within the row (height 1).
            offsets = np.linspace(-0.12, 0.12, len(scores)) if len(scores) > 1 else np.zeros(1)
            axes.scatter(scores, row + offsets, s=16, color=colour, alpha=0.35, linewidth=0, zorder=2)

            extent = summary.iqm_interval or summary.range
            axes.plot(extent, [row, row], color=colour, linewidth=5, alpha=0.45, solid_capstyle="butt")
            axes.plot([summary.iqm] * 2, [row - 0.24, row + 0.24], color=colour, linewidth=2.4, zorder=3)

        # From top to bottom, as in the table: the axis is reversed.
        axes.set_yticks(range(len(summaries)), [label for label, _, _ in summaries])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(len(summaries) - 0.45, -0.55)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.05)
        axes.set_title(title)
        extent_text = _extent([summary.n for _, summary, _ in summaries])
        _caption(axes, f"stroke: IQM over seeds; bar: {extent_text}; points: seeds")
        return figure


@contextmanager
def _figure(file: Path, height: float) -> Iterator[tuple[Any, Any]]:
    """Create a figure with axes, without pyplot, which would keep it in memory; save it at the end."""
    matplotlib = import_extra("matplotlib", extra="benchmark", needed_by="a plot")
    figures = import_extra("matplotlib.figure", extra="benchmark", needed_by="a plot")
    with matplotlib.rc_context(STYLE):
        figure = figures.Figure(figsize=(7.2, height), dpi=DPI)
        yield figure, figure.add_subplot()

        # Removed first: a link would redirect the image to another file. Without matplotlib's version in it, equal
        # results give equal files.
        remove_path(file)
        figure.savefig(file, bbox_inches="tight", pad_inches=0.12, facecolor="white", metadata={"Software": None})


def _colour_and_dashes(position: int) -> tuple[str, Any]:
    return COLOURS[position % len(COLOURS)], DASHES[position // len(COLOURS) % len(DASHES)]


def _extent(counts: Sequence[int]) -> str:
    """Describe what bars and bands show for these numbers of seeds."""
    if max(counts) < MIN_SEEDS:
        return "lowest to highest"
    few = f", below {MIN_SEEDS} seeds lowest to highest" if min(counts) < MIN_SEEDS else ""
    return f"its 95 % bootstrap interval{few}"


def _caption(axes: Any, text: str) -> None:
    """Add a small right-aligned text below the plot."""
    # 25 points below the lower right corner of the axes, to the right of the axis label.
    position = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(text, (1, 0), (0, -25), fontsize=8, color=SOFT, annotation_clip=False, **position)
