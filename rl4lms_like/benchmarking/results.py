"""Results of a benchmark read from its folder: results, summaries and missing runs.

    runs/<label>/seed_<k>/result.json  ──►  Results ──►  results.json, table.csv, table.md

Only the folders are read, so a report can be written while runs are active, or later.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.benchmarking.jobs import Job, Result, jobs_of, read_result, said, state_of
from rl4lms_like.benchmarking.spec import Benchmark
from rl4lms_like.benchmarking.statistics import MIN_SEEDS, Interval, Summary, summarize
from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.run_folder import to_json, write_whole

COSTS = {"tokens": "tokens", "seconds": "s", "peak_memory_mb": "MiB", "peak_gpu_memory_mb": "MiB", "model_mb": "MiB"}

FEW_SEEDS = f"Fewer than {MIN_SEEDS} seeds: their range (lowest to highest score) instead of a bootstrap interval"


@dataclass(frozen=True)
class Results:
    """Results of a benchmark so far.

    Args:
        benchmark: the spec.
        jobs: all jobs.
        results: (label, seed) -> result, of the jobs that are done.
        metrics: keys to tabulate, `split:metric`.
        summaries: label -> key -> summary, without keys that no run has.
    """

    benchmark: Benchmark
    jobs: tuple[Job, ...]
    results: Mapping[tuple[str, int], Result]
    metrics: tuple[str, ...]
    summaries: Mapping[str, Mapping[str, Summary]]

    @property
    def labels(self) -> list[str]:
        """Labels in the order of the spec."""
        return [cell.label for cell in self.benchmark.cells]

    def of(self, label: str) -> list[Result]:
        """Return the results of a label, ordered by seed."""
        return [result for (owner, _), result in sorted(self.results.items()) if owner == label]

    def folders(self, label: str) -> list[Path]:
        """Return the folders of a label's finished runs, ordered by seed."""
        return [job.folder for job in self.jobs if job.label == label and (label, job.seed) in self.results]

    def missing(self) -> list[Job]:
        """Return the jobs that failed or were not started yet."""
        return [job for job in self.jobs if (job.label, job.seed) not in self.results]

    def cost(self, label: str, name: str) -> float | None:
        """Return the mean of a field of `Result` over the seeds."""
        values = [value for result in self.of(label) if (value := getattr(result, name)) is not None]
        return sum(values) / len(values) if values else None


def collect(benchmark: Benchmark) -> Results:
    """Read the results that exist."""
    jobs = tuple(jobs_of(benchmark))
    results = {(job.label, job.seed): read_result(job.folder) for job in jobs if state_of(job) == "done"}
    metrics = _metrics(benchmark, list(results.values()))
    summaries = {
        cell.label: summaries_of([result for (label, _), result in results.items() if label == cell.label], metrics)
        for cell in benchmark.cells
    }
    return Results(benchmark, jobs, results, metrics, summaries)


def summaries_of(results: Sequence[Result], metrics: Sequence[str]) -> dict[str, Summary]:
    """Return metric -> summary over the results that have a value for it."""
    values = {key: scores_of(results, key) for key in metrics}
    return {key: summarize(scores) for key, scores in values.items() if scores}


def scores_of(results: Sequence[Result], key: str) -> list[float]:
    """Return the values of a metric, `split:metric`."""
    return [score for result in results if (score := result.scores.get(key)) is not None]


def write_tables(found: Results) -> None:
    """Write `results.json`, `table.csv` and `table.md` into the benchmark's folder."""
    folder = found.benchmark.results
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "results.json", json.dumps(_as_data(found), indent=2, ensure_ascii=False) + "\n")
    write_whole(folder / "table.csv", _as_csv(found))
    write_whole(folder / "table.md", as_markdown(found))


def heading(found: Results, key: str) -> str:
    """Return the name of a metric in tables, without the split of the benchmark."""
    return key.removeprefix(f"{found.benchmark.spec.split}:")


def mean_text(summary: Summary) -> str:
    """Format as `0.839 ± 0.045`: two significant digits of the standard deviation, the same decimals of the mean."""
    decimals = _decimals(summary)
    mean = _with_decimals(summary.mean, decimals)
    return mean if summary.std is None else f"{mean} ± {_with_decimals(summary.std, decimals)}"


def iqm_text(summary: Summary) -> str:
    """Format the interquartile mean with the decimals of the mean."""
    return _with_decimals(summary.iqm, _decimals(summary))


def iqm_interval_text(summary: Summary) -> str:
    """Format the interval of the IQM, or the range for few seeds, with the same decimals; empty for one seed."""
    decimals = _decimals(summary)
    if summary.iqm_interval is not None or summary.n == 1:
        return interval_text(summary.iqm_interval, decimals)
    return f"range {' to '.join(_with_decimals(end, decimals) for end in summary.range)}"


def interval_text(interval: Interval | None, decimals: int | None = None) -> str:
    """Format as `[0.12, 0.34]`; empty for None."""
    return "" if interval is None else f"[{', '.join(_with_decimals(end, decimals) for end in interval)}]"


def _decimals(summary: Summary) -> int | None:
    """Return the decimals that show two digits of the standard deviation; None to format each number separately."""
    if not summary.std or abs(summary.mean) >= 1e4:
        return None
    decimals = 1 - math.floor(math.log10(summary.std))
    return decimals if 0 <= decimals <= 6 else None


def _with_decimals(value: float, decimals: int | None) -> str:
    return format_number(value) if decimals is None else f"{value:.{decimals}f}".replace("-", "−")


def rows_of(found: Results, key: str) -> list[list[str]]:
    """Return the rows of a metric's table: label, seeds, mean ± std, IQM, its interval."""
    rows = []
    for label in found.labels:
        summary = found.summaries[label].get(key)
        if summary is None:
            rows.append([label, f"0 of {len(found.benchmark.seeds)}", "", "", ""])
            continue
        rows.append(
            [
                label,
                f"{summary.n} of {len(found.benchmark.seeds)}",
                mean_text(summary),
                iqm_text(summary),
                iqm_interval_text(summary),
            ]
        )
    return rows


HEADINGS = ("run", "seeds", "mean ± std", "IQM", "95 % interval of the IQM")


def cost_rows(found: Results) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the cost table, means over seeds, without columns that have no values."""
    there = [name for name in COSTS if any(found.cost(label, name) is not None for label in found.labels)]
    words = {
        "tokens": "tokens",
        "seconds": "seconds",
        "peak_memory_mb": "peak memory, MiB",
        "peak_gpu_memory_mb": "peak GPU memory, MiB",
        "model_mb": "saved model, MiB",
    }
    rows = [
        [label, *(format_number(cost) if (cost := found.cost(label, name)) is not None else "" for name in there)]
        for label in found.labels
    ]
    return ["run", *(words[name] for name in there)], rows


def as_markdown(found: Results) -> str:
    """Format all tables as Markdown."""
    parts = [f"# {found.benchmark.name}\n"]
    for key in found.metrics:
        parts += [f"## {heading(found, key)}\n", _markdown_table(HEADINGS, rows_of(found, key))]
    head, rows = cost_rows(found)
    if found.results:
        parts += ["## Cost of a run\n", _markdown_table(head, rows)]
    if found.missing():
        parts += [
            "## Missing\n",
            "".join(f"* {job.name} {said(state_of(job))}: {job.folder}\n" for job in found.missing()),
        ]
    note = (
        f"Metrics on the split `{found.benchmark.spec.split}` after training. IQM: interquartile mean over seeds; "
        f"interval: stratified percentile bootstrap (arXiv 2108.13264). {FEW_SEEDS}.\n"
    )
    return "\n".join([*parts, note])


def _metrics(benchmark: Benchmark, results: Sequence[Result]) -> tuple[str, ...]:
    split = benchmark.spec.split
    if benchmark.spec.metrics is None:
        keys = dict.fromkeys(key for result in results for key in result.scores if key.startswith(f"{split}:"))
        return tuple(keys)
    return tuple(dict.fromkeys(key if ":" in key else f"{split}:{key}" for key in benchmark.spec.metrics))


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    aligned = [
        " | ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    rule = "|".join([f"{'-' * (widths[0] + 2)}", *(f"{'-' * (width + 1)}:" for width in widths[1:])])
    return "\n".join([f"| {aligned[0]} |", f"|{rule}|", *(f"| {line} |" for line in aligned[1:])]) + "\n"


def _as_csv(found: Results) -> str:
    """Format the summaries as CSV: one line for each label and metric, with unrounded numbers."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    ends = ["mean_low", "mean_high", "iqm_low", "iqm_high", "lowest", "highest"]
    writer.writerow(["label", "metric", "n", "n_seeds", "mean", "std", "iqm", *ends, *COSTS])
    for label in found.labels:
        for key in found.metrics:
            summary = found.summaries[label].get(key)
            if summary is not None:
                numbers = [summary.mean, summary.std, summary.iqm]
                bounds = [*(summary.mean_interval or ("", "")), *(summary.iqm_interval or ("", "")), *summary.range]
                costs = [found.cost(label, name) for name in COSTS]
                writer.writerow([label, key, summary.n, len(found.benchmark.seeds), *numbers, *bounds, *costs])
    return stream.getvalue()


def _as_data(found: Results) -> dict[str, Any]:
    return {
        "name": found.benchmark.name,
        "split": found.benchmark.spec.split,
        "seeds": list(found.benchmark.seeds),
        "runs": [to_json(asdict(result)) for result in found.results.values()],
        "missing": [{"label": job.label, "seed": job.seed, "folder": str(job.folder)} for job in found.missing()],
        "summary": {label: {k: asdict(s) for k, s in keys.items()} for label, keys in found.summaries.items()},
        "changes": {cell.label: to_json(cell.changes) for cell in found.benchmark.cells},
    }
