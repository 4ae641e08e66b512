"""Results of a benchmark read from its folder: tables, and the statistical comparison of `rl4lms-like compare`.

    runs/<label>/seed_<k>/result.json  ──►  Results ──►  results.json, table.csv, table.md

    test:sentiment/compound
           seeds       mean ± std    IQM  95 % interval of the IQM
      ppo     10    0.712 ± 0.031   0.71  [0.69, 0.73]
      a2c     10    0.624 ± 0.052   0.62  [0.59, 0.65]
      difference of the means 0.088 [0.05, 0.12];  P(ppo > a2c) = 0.93 [0.81, 1]

Only the folders are read, so a report can be written while runs are active, or later. In a comparison, whether higher
is better depends on the metric. If the interval of P contains 0.5, the seeds do not show which one is better.
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

from rl4lms_like.benchmarking.jobs import RESULT_FILE, RUNS, STATE_TEXTS, Job, Result, jobs_of, read_result, state_of
from rl4lms_like.benchmarking.spec import Benchmark
from rl4lms_like.benchmarking.statistics import MIN_SEEDS, Interval, Summary, compare_scores, summarize
from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.run_folder import to_json, write_whole

HEADINGS = ("run", "seeds", "mean ± std", "IQM", "95 % interval of the IQM")
COSTS = {
    "tokens": "tokens",
    "seconds": "seconds",
    "peak_memory_mb": "peak memory, MiB",
    "peak_gpu_memory_mb": "peak GPU memory, MiB",
    "model_mb": "saved model, MiB",
}
"""Field of `Result` -> heading."""

FEW_SEEDS = f"Fewer than {MIN_SEEDS} seeds: their range (lowest to highest score) instead of a bootstrap interval"


@dataclass(frozen=True)
class Results:
    """Results of a benchmark so far.

    Args:
        benchmark: the spec.
        jobs: all jobs.
        finished: (label, seed) -> result, of the jobs that are done.
        metrics: keys to tabulate, `split:metric`.
        summaries: label -> key -> summary, without keys that no run has.
    """

    benchmark: Benchmark
    jobs: tuple[Job, ...]
    finished: Mapping[tuple[str, int], Result]
    metrics: tuple[str, ...]
    summaries: Mapping[str, Mapping[str, Summary]]

    @property
    def labels(self) -> list[str]:
        """Labels in the order of the spec."""
        return [cell.label for cell in self.benchmark.cells]

    @property
    def missing(self) -> list[Job]:
        """Jobs that failed or were not started yet."""
        return [job for job in self.jobs if (job.label, job.seed) not in self.finished]

    def of(self, label: str) -> list[Result]:
        """Return the results of a label, ordered by seed."""
        return [result for (result_label, _), result in sorted(self.finished.items()) if result_label == label]

    def folders(self, label: str) -> list[Path]:
        """Return the folders of a label's finished runs, ordered by seed."""
        return [job.folder for job in self.jobs if job.label == label and (label, job.seed) in self.finished]

    def cost(self, label: str, name: str) -> float | None:
        """Return the mean of a field of `Result` over the seeds."""
        # Without seeds that lack it: the time of a resumed run is unknown.
        values = [getattr(result, name) for result in self.of(label)]
        values = [value for value in values if value is not None]
        return sum(values) / len(values) if values else None

    def heading(self, key: str) -> str:
        """Return the name of a metric in tables, without the split of the benchmark."""
        return key.removeprefix(f"{self.benchmark.spec.split}:")

    def rows(self, key: str) -> list[list[str]]:
        """Return the rows of a metric's table: label, seeds, mean ± std, IQM, its interval."""
        n_seeds = len(self.benchmark.seeds)
        rows = []
        for label in self.labels:
            summary = self.summaries[label].get(key)
            if summary is None:
                rows.append([label, f"0 of {n_seeds}", "", "", ""])
            else:
                rows.append([label, f"{summary.n} of {n_seeds}", *summary_texts(summary)])
        return rows

    def cost_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows of the cost table, means over seeds, without columns that have no values."""
        columns: dict[str, list[float | None]] = {}
        for name in COSTS:
            costs = [self.cost(label, name) for label in self.labels]
            if any(cost is not None for cost in costs):
                columns[name] = costs

        rows = []
        for row, label in enumerate(self.labels):
            cells = [label]
            for costs in columns.values():
                cost = costs[row]
                cells.append("" if cost is None else format_number(cost))
            rows.append(cells)
        return ["run", *(COSTS[name] for name in columns)], rows


def collect(benchmark: Benchmark) -> Results:
    """Read the results that exist."""
    # Only results of the present configs: others would compare different things under one label.
    jobs = tuple(jobs_of(benchmark))
    finished: dict[tuple[str, int], Result] = {}
    for job in jobs:
        if state_of(job) == "done":
            finished[job.label, job.seed] = read_result(job.folder)

    # Default: all metrics of the split, in the order in which the runs report them.
    keys = benchmark.spec.metrics
    split = benchmark.spec.split
    if keys is None:
        keys = []
        for result in finished.values():
            keys += [key for key in result.scores if key.startswith(f"{split}:")]
    metrics = tuple(dict.fromkeys(_with_split(key, split) for key in keys))

    summaries: dict[str, dict[str, Summary]] = {}
    for cell in benchmark.cells:
        results = [result for (label, _), result in finished.items() if label == cell.label]
        summaries[cell.label] = {}
        for key in metrics:
            scores = scores_of(results, key)
            if scores:
                summaries[cell.label][key] = summarize(scores)
    return Results(benchmark, jobs=jobs, finished=finished, metrics=metrics, summaries=summaries)


def _with_split(key: str, split: str) -> str:
    """Return `split:key`; unchanged if the key has a split of its own."""
    return key if ":" in key else f"{split}:{key}"


def scores_of(results: Sequence[Result], key: str) -> list[float]:
    """Return the values of a metric, `split:metric`."""
    return [score for result in results if (score := result.scores.get(key)) is not None]


def write_tables(results: Results) -> None:
    """Write `results.json`, `table.csv` and `table.md` into the benchmark's folder."""
    summaries: dict[str, dict[str, Any]] = {}
    for label, by_key in results.summaries.items():
        summaries[label] = {key: asdict(summary) for key, summary in by_key.items()}
    data = {
        "name": results.benchmark.name,
        "split": results.benchmark.spec.split,
        "seeds": list(results.benchmark.seeds),
        "runs": [to_json(asdict(result)) for result in results.finished.values()],
        "missing": [{"label": job.label, "seed": job.seed, "folder": str(job.folder)} for job in results.missing],
        "summary": summaries,
        "changes": {cell.label: to_json(cell.changes) for cell in results.benchmark.cells},
    }

    folder = results.benchmark.results
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "results.json", json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    write_whole(folder / "table.csv", _as_csv(results))
    write_whole(folder / "table.md", as_markdown(results))


def as_markdown(results: Results) -> str:
    """Format all tables as Markdown."""
    blocks = [f"# {results.benchmark.name}\n"]  # an empty line between any two
    for key in results.metrics:
        blocks += [f"## {results.heading(key)}\n", _markdown_table(HEADINGS, results.rows(key))]
    if results.finished:
        blocks += ["## Cost of a run\n", _markdown_table(*results.cost_rows())]
    if results.missing:
        lines = [f"* {job.name} {STATE_TEXTS[state_of(job)]}: {job.folder}\n" for job in results.missing]
        blocks += ["## Missing\n", "".join(lines)]

    blocks.append(
        f"Metrics on the split `{results.benchmark.spec.split}` after training. IQM: interquartile mean over seeds; "
        f"interval: stratified percentile bootstrap (arXiv 2108.13264). {FEW_SEEDS}.\n"
    )
    return "\n".join(blocks)


def summary_texts(summary: Summary) -> tuple[str, str, str]:
    """Format mean ± std, IQM and its interval with the same decimals, those of two digits of the standard deviation.

    With few seeds their range replaces the interval; one seed has neither.
    """
    # std 0.031 -> 3 decimals, std 5.2 -> 1. Not for large or tiny numbers, which are formatted each by itself (None).
    decimals: int | None = None
    if summary.std and abs(summary.mean) < 1e4:
        digits = 1 - math.floor(math.log10(summary.std))
        if 0 <= digits <= 6:
            decimals = digits

    mean = _with_decimals(summary.mean, decimals)
    if summary.std is not None:
        mean += f" ± {_with_decimals(summary.std, decimals)}"
    iqm = _with_decimals(summary.iqm, decimals)

    extent = interval_text(summary.iqm_interval, decimals)
    if summary.iqm_interval is None and summary.n > 1:
        extent = f"range {' to '.join(_with_decimals(end, decimals) for end in summary.range)}"
    return mean, iqm, extent


def interval_text(interval: Interval | None, decimals: int | None = None) -> str:
    """Format as `[0.12, 0.34]`; empty for None."""
    if interval is None:
        return ""
    low, high = interval
    return f"[{_with_decimals(low, decimals)}, {_with_decimals(high, decimals)}]"


def _with_decimals(value: float, decimals: int | None) -> str:
    return format_number(value) if decimals is None else f"{value:.{decimals}f}".replace("-", "−")


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose first column has names, left-aligned, and the others numbers, right-aligned."""
    escaped = []
    for row in (head, *rows):
        escaped.append([cell.replace("|", "\\|") for cell in row])
    widths = [max(map(len, column)) for column in zip(*escaped, strict=True)]

    # Padded, so that the file is readable as plain text, too.
    lines = []
    for row in escaped:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")

    # |-----|----:|  where the colon aligns a column to the right
    rule = ["-" * (widths[0] + 2)]
    rule += [f"{'-' * (width + 1)}:" for width in widths[1:]]
    lines.insert(1, f"|{'|'.join(rule)}|")
    return "\n".join(lines) + "\n"


def _as_csv(results: Results) -> str:
    """Format the summaries as CSV: one line for each label and metric, with unrounded numbers."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    ends = ["mean_low", "mean_high", "iqm_low", "iqm_high", "lowest", "highest"]
    writer.writerow(["label", "metric", "n", "n_seeds", "mean", "std", "iqm", *ends, *COSTS])

    # Empty cells where few seeds have no interval, or a cost is unknown (the writer's text for None).
    for label in results.labels:
        for key, summary in results.summaries[label].items():
            numbers = [summary.mean, summary.std, summary.iqm]
            bounds = [*(summary.mean_interval or ("", "")), *(summary.iqm_interval or ("", "")), *summary.range]
            costs = [results.cost(label, name) for name in COSTS]
            writer.writerow([label, key, summary.n, len(results.benchmark.seeds), *numbers, *bounds, *costs])
    return stream.getvalue()


# --- comparison ------------------------------------------------------------------------------------------------------


def compare(a: str | Path, b: str | Path, *, metrics: Sequence[str] = (), split: str = "test") -> str:
    """Compare the finished runs of two labels, or of all labels that two benchmarks have in common.

    Args:
        a: `RESULTS/LABEL`, or a benchmark's results folder.
        b: the other label or folder.
        metrics: keys; `val:KEY` selects another split. Default: all metrics of the split that both have.
        split: split of metrics without one in their key.

    Returns:
        Formatted text.

    Raises:
        RL4LMsLikeError: one of them has no finished run, or they have no metric in common.
    """
    results_of_a = _results_by_label(Path(a))
    results_of_b = _results_by_label(Path(b))
    shared = [label for label in results_of_a if label in results_of_b]
    if not shared:
        labels_of_a = ", ".join(results_of_a) or "a label"
        labels_of_b = ", ".join(results_of_b) or "a label"
        both = f"{a}: {labels_of_a} and {b}: {labels_of_b}"
        raise RL4LMsLikeError(f"nothing to compare, no label is in both ({both}); give RESULTS/LABEL twice")

    # The folders' names, resolved for `.`; the paths where both have the same name.
    names = (Path(a).resolve().name, Path(b).resolve().name)
    if names[0] == names[1]:
        names = (str(a), str(b))

    # All labels are compared before anything is returned: a metric that one of them lacks is an error.
    blocks = []
    for label in shared:
        if label:
            blocks.append(f"{label}\n")
        for key in _shared_metrics(results_of_a[label], results_of_b[label], metrics, split):
            blocks.append(_comparison(key, names, results_of_a[label], results_of_b[label]))
    return "\n".join(blocks)


def _shared_metrics(a: Sequence[Result], b: Sequence[Result], metrics: Sequence[str], split: str) -> list[str]:
    """Return the metrics to compare, `split:metric`: the chosen ones, or all of the split that both have.

    Raises:
        RL4LMsLikeError: a chosen metric is missing in one of them, or there is none.
    """
    keys_of_a: dict[str, None] = {}  # each once, in order
    for result in a:
        keys_of_a |= dict.fromkeys(result.scores)
    of_both = [key for key in keys_of_a if scores_of(b, key)]
    listed = ", ".join(of_both) or "none"

    chosen = [_with_split(key, split) for key in metrics]
    unknown = [key for key in chosen if key not in of_both]
    if unknown:
        raise RL4LMsLikeError(f"{', '.join(unknown)}: not a metric of both; both have {listed}")
    if chosen:
        return chosen

    # A key may be there without a number: scores that are not finite are None.
    of_split = [key for key in of_both if key.startswith(f"{split}:") and scores_of(a, key)]
    if not of_split:
        raise RL4LMsLikeError(f"no common metric on the split {split!r}; both have {listed}")
    return of_split


def _results_by_label(path: Path) -> dict[str, list[Result]]:
    """Return label -> results of a benchmark. The label is empty for `RESULTS/LABEL` and `RESULTS/runs/LABEL`."""
    by_label: dict[str, list[Result]] = {}
    if (path / RUNS).is_dir():
        for folder in sorted((path / RUNS).iterdir()):
            by_label[folder.name] = _results_in(folder)
    else:
        by_label[""] = _results_in(path) or _results_in(path.parent / RUNS / path.name)

    # A label whose runs have not finished is left out.
    by_label = {label: results for label, results in by_label.items() if results}
    if not by_label:
        raise RL4LMsLikeError(f"{path}: no finished run; expected a benchmark's results folder, or a label in it")
    return by_label


def _results_in(folder: Path) -> list[Result]:
    results = [read_result(file.parent) for file in folder.glob(f"seed_*/{RESULT_FILE}")]
    return sorted(results, key=lambda result: result.seed)


def _comparison(key: str, names: tuple[str, str], a: Sequence[Result], b: Sequence[Result]) -> str:
    """Format the comparison of one metric."""
    compared = compare_scores(scores_of(a, key), scores_of(b, key))
    width = max(map(len, names))
    lines = [key, f"  {'':{width}}  {'seeds':>5}  {'mean ± std':>18}  {'IQM':>8}  95 % interval of the IQM"]
    for name, summary in zip(names, (compared.a, compared.b), strict=True):
        mean, iqm, interval = summary_texts(summary)
        lines.append(f"  {name:{width}}  {summary.n:>5}  {mean:>18}  {iqm:>8}  {interval}".rstrip())

    difference = f"{format_number(compared.difference)} {interval_text(compared.difference_interval)}".strip()
    improvement = f"{format_number(compared.improvement)} {interval_text(compared.improvement_interval)}".strip()
    lines.append(f"  difference of the means {difference};  P({names[0]} > {names[1]}) = {improvement}")

    # What may not be concluded: P of one or few seeds looks like a result.
    if min(compared.a.n, compared.b.n) == 1:
        lines.append("  With one seed there are no intervals, and no conclusion about other seeds is possible.")
    elif compared.difference_interval is None:
        lines.append(f"  {FEW_SEEDS}; P is the fraction of pairs among these seeds only.")
    return "\n".join([*lines, ""])
