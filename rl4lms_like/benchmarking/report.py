"""Report of a benchmark, `report.html`: one file that needs neither network nor scripts.

Results ──► tables, PNGs in figures/ ──report.html.j2──► report.html      the PNGs are embedded in the page
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.benchmarking.curves import LearningCurves, figures_folder, file_name
from rl4lms_like.benchmarking.jobs import Job, last_lines, said, state_of
from rl4lms_like.benchmarking.plots import plot_curves, plot_scores
from rl4lms_like.benchmarking.results import (
    FEW_SEEDS,
    HEADINGS,
    Results,
    cost_rows,
    heading,
    interval_text,
    rows_of,
    scores_of,
)
from rl4lms_like.benchmarking.statistics import Interval, interval_over_seeds, probability_of_improvement
from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.run_folder import REPORT_FILE, write_whole
from rl4lms_like.training.config.yaml_file import dump_yaml

MAX_COMPARED = 8
"""Largest number of labels for which all pairs are compared."""


@dataclass(frozen=True)
class Picture:
    """Plot in the page.

    Args:
        title: alternative text of the image.
        data: `data:` URL of the PNG.
    """

    title: str
    data: str


@dataclass(frozen=True)
class Section:
    """Section of one metric.

    Args:
        title: key of the metric.
        picture: plot of the scores.
        rows: rows of the table.
        compared: label -> for each label the probability of improvement over it, and its interval.
    """

    title: str
    picture: Picture | None
    rows: list[list[str]]
    compared: list[tuple[str, list[tuple[str, str]]]]


def write_report(found: Results, curves: Sequence[LearningCurves]) -> Path:
    """Write the plots and the page, and return the path of the page."""
    from jinja2 import Environment, PackageLoader

    benchmark = found.benchmark
    environment = Environment(
        loader=PackageLoader("rl4lms_like", "benchmarking"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    cost_head, costs = cost_rows(found)
    page = environment.get_template("report.html.j2").render(
        name=benchmark.name,
        status=_status(found),
        headings=HEADINGS,
        few_seeds=FEW_SEEDS,
        sections=[_section(found, key) for key in found.metrics],
        labels=found.labels,
        pictures=_curve_pictures(found, curves),
        cost_head=cost_head,
        costs=costs,
        missing=[_missing(job) for job in found.missing()],
        run_head=["run", "seed", *(heading(found, key) for key in found.metrics), "tokens", "seconds", ""],
        runs=_runs(found),
        changes=[(cell.label, str(cell.config_path), _as_yaml(cell.changes)) for cell in benchmark.cells],
        spec=benchmark.text,
        versions=_versions(found),
    )
    path = benchmark.results / REPORT_FILE
    write_whole(path, page)
    return path


def _missing(job: Job) -> tuple[str, str, str, str]:
    state = state_of(job)
    end = last_lines(job.folder, 1) if state in ("unfinished", "stopped") else []
    return job.name, said(state), str(job.folder), "".join(end)


def _status(found: Results) -> str:
    n_jobs, n_done = len(found.jobs), len(found.results)
    n_labels, n_seeds = len(found.labels), len(found.benchmark.seeds)
    runs = f"all {n_jobs} runs done" if n_done == n_jobs else f"{n_done} of {n_jobs} runs done"
    return f"{n_labels} label{'s' if n_labels != 1 else ''} × {n_seeds} seed{'s' if n_seeds != 1 else ''}, {runs}"


def _section(found: Results, key: str) -> Section:
    title = heading(found, key)
    there = [
        (label, found.summaries[label][key], scores_of(found.of(label), key))
        for label in found.labels
        if key in found.summaries[label]
    ]
    picture = None
    if there:
        file = figures_folder(found.benchmark.results) / f"scores_{file_name(key)}.png"
        picture = _picture(title, plot_scores(title, there, found.labels, file))
    compared = [(label, scores) for label, _, scores in there]
    return Section(title, picture, rows_of(found, key), _pairs(compared))


def _pairs(scores: Sequence[tuple[str, list[float]]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the probability of improvement of all pairs of labels; empty for one label or more than `MAX_COMPARED`."""
    n = len(scores)
    if not 2 <= n <= MAX_COMPARED:
        return []
    cells = [[("", "")] * n for _ in range(n)]
    for i, j in itertools.combinations(range(n), 2):
        a, b = scores[i][1], scores[j][1]
        probability = float(probability_of_improvement(a, b))
        interval = interval_over_seeds(probability_of_improvement, a, b)
        cells[i][j] = _pair(probability, interval)
        cells[j][i] = _pair(1 - probability, None if interval is None else (1 - interval[1], 1 - interval[0]))
    return [(label, row) for (label, _), row in zip(scores, cells, strict=True)]


def _pair(probability: float, interval: Interval | None) -> tuple[str, str]:
    return f"{probability:.2f}", interval_text(interval, 2)


def _curve_pictures(found: Results, curves: Sequence[LearningCurves]) -> list[Picture]:
    folder = figures_folder(found.benchmark.results)
    return [
        _picture(curve.title, plot_curves(curve, found.labels, folder / f"curve_{file_name(curve.spec.key)}.png"))
        for curve in curves
        if curve.lines
    ]


def _picture(title: str, file: Path) -> Picture:
    return Picture(title, f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}")


def _runs(found: Results) -> list[tuple[list[str], str]]:
    """Return the table row of each run, and the relative path of its own report."""
    rows = []
    for job in found.jobs:
        result = found.results.get((job.label, job.seed))
        if result is not None:
            scores = [format_number(result.scores.get(key), 4) for key in found.metrics]
            cells = [job.label, str(job.seed), *scores, format_number(result.tokens), format_number(result.seconds)]
            rows.append((cells, (job.folder / REPORT_FILE).relative_to(found.benchmark.results).as_posix()))
    return rows


def _as_yaml(changes: Mapping[str, Any]) -> str:
    return dump_yaml(changes).strip() if changes else ""


def _versions(found: Results) -> list[tuple[str, str]]:
    """Return package -> the versions used by the runs."""
    versions: dict[str, set[str]] = {}
    for result in found.results.values():
        for package, version in result.versions.items():
            versions.setdefault(package, set()).add(version)
    return [(package, ", ".join(sorted(there))) for package, there in versions.items()]
