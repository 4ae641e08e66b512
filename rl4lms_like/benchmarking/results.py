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

from rl4lms_like.benchmarking.jobs import RESULT_FILE, RUNS, STATE_TEXTS, Job, Result, jobs_of, read_result, state_of
from rl4lms_like.benchmarking.spec import Benchmark
from rl4lms_like.benchmarking.statistics import MIN_SEEDS, Interval, Summary, compare_scores, summarize
from rl4lms_like.core.errors import RL4LMsLikeError
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

    @property
    def missing(self) -> list[Job]:
        """Jobs that failed or were not started yet."""
        return [job for job in self.jobs if (job.label, job.seed) not in self.results]

    def of(self, label: str) -> list[Result]:
        """Return the results of a label, ordered by seed."""
        return [result for (owner, _), result in sorted(self.results.items()) if owner == label]

    def folders(self, label: str) -> list[Path]:
        """Return the folders of a label's finished runs, ordered by seed."""
        return [job.folder for job in self.jobs if job.label == label and (label, job.seed) in self.results]

    def cost(self, label: str, name: str) -> float | None:
        """Return the mean of a field of `Result` over the seeds."""
        values = [value for result in self.of(label) if (value := getattr(result, name)) is not None]
        return sum(values) / len(values) if values else None

    def heading(self, key: str) -> str:
        """Return the name of a metric in tables, without the split of the benchmark."""
        return key.removeprefix(f"{self.benchmark.spec.split}:")

    def rows(self, key: str) -> list[list[str]]:
        """Return the rows of a metric's table: label, seeds, mean ± std, IQM, its interval."""
        summaries = [(label, self.summaries[label].get(key)) for label in self.labels]
        n_seeds = len(self.benchmark.seeds)
        return [
            [label, f"{summary.n} of {n_seeds}", *summary_texts(summary)]
            if summary is not None
            else [label, f"0 of {n_seeds}", "", "", ""]
            for label, summary in summaries
        ]

    def cost_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows of the cost table, means over seeds, without columns that have no values."""
        costs = {label: {name: self.cost(label, name) for name in COSTS} for label in self.labels}
        there = [name for name in COSTS if any(costs[label][name] is not None for label in self.labels)]
        rows = [
            [label, *("" if known[name] is None else format_number(known[name]) for name in there)]
            for label, known in costs.items()
        ]
        return ["run", *(COSTS[name] for name in there)], rows


def collect(benchmark: Benchmark) -> Results:
    """Read the results that exist."""
    jobs = tuple(jobs_of(benchmark))
    results = {(job.label, job.seed): read_result(job.folder) for job in jobs if state_of(job) == "done"}
    split, asked = benchmark.spec.split, benchmark.spec.metrics
    if asked is None:
        asked = [key for result in results.values() for key in result.scores if key.startswith(f"{split}:")]
    metrics = tuple(dict.fromkeys(key if ":" in key else f"{split}:{key}" for key in asked))
    summaries: dict[str, dict[str, Summary]] = {}
    for cell in benchmark.cells:
        own = [result for (label, _), result in results.items() if label == cell.label]
        values = {key: scores_of(own, key) for key in metrics}
        summaries[cell.label] = {key: summarize(scores) for key, scores in values.items() if scores}
    return Results(benchmark, jobs, results, metrics, summaries)


def scores_of(results: Sequence[Result], key: str) -> list[float]:
    """Return the values of a metric, `split:metric`."""
    return [score for result in results if (score := result.scores.get(key)) is not None]


def write_tables(found: Results) -> None:
    """Write `results.json`, `table.csv` and `table.md` into the benchmark's folder."""
    folder = found.benchmark.results
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "name": found.benchmark.name,
        "split": found.benchmark.spec.split,
        "seeds": list(found.benchmark.seeds),
        "runs": [to_json(asdict(result)) for result in found.results.values()],
        "missing": [{"label": job.label, "seed": job.seed, "folder": str(job.folder)} for job in found.missing],
        "summary": {label: {k: asdict(s) for k, s in keys.items()} for label, keys in found.summaries.items()},
        "changes": {cell.label: to_json(cell.changes) for cell in found.benchmark.cells},
    }
    write_whole(folder / "results.json", json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    write_whole(folder / "table.csv", _as_csv(found))
    write_whole(folder / "table.md", as_markdown(found))


def as_markdown(found: Results) -> str:
    """Format all tables as Markdown."""
    parts = [f"# {found.benchmark.name}\n"]
    for key in found.metrics:
        parts += [f"## {found.heading(key)}\n", _markdown_table(HEADINGS, found.rows(key))]
    if found.results:
        parts += ["## Cost of a run\n", _markdown_table(*found.cost_rows())]
    if found.missing:
        missing = [f"* {job.name} {STATE_TEXTS[state_of(job)]}: {job.folder}\n" for job in found.missing]
        parts += ["## Missing\n", "".join(missing)]
    note = (
        f"Metrics on the split `{found.benchmark.spec.split}` after training. IQM: interquartile mean over seeds; "
        f"interval: stratified percentile bootstrap (arXiv 2108.13264). {FEW_SEEDS}.\n"
    )
    return "\n".join([*parts, note])


def summary_texts(summary: Summary) -> tuple[str, str, str]:
    """Format mean ± std, IQM and its interval with the same decimals, those of two digits of the standard deviation.

    With few seeds their range replaces the interval; one seed has neither.
    """
    decimals: int | None = None  # each number by itself
    if summary.std and abs(summary.mean) < 1e4:
        digits = 1 - math.floor(math.log10(summary.std))
        decimals = digits if 0 <= digits <= 6 else None
    mean, iqm = _with_decimals(summary.mean, decimals), _with_decimals(summary.iqm, decimals)
    if summary.std is not None:
        mean += f" ± {_with_decimals(summary.std, decimals)}"
    if summary.iqm_interval is not None or summary.n == 1:
        return mean, iqm, interval_text(summary.iqm_interval, decimals)
    return mean, iqm, f"range {' to '.join(_with_decimals(end, decimals) for end in summary.range)}"


def interval_text(interval: Interval | None, decimals: int | None = None) -> str:
    """Format as `[0.12, 0.34]`; empty for None."""
    return "" if interval is None else f"[{', '.join(_with_decimals(end, decimals) for end in interval)}]"


def _with_decimals(value: float, decimals: int | None) -> str:
    return format_number(value) if decimals is None else f"{value:.{decimals}f}".replace("-", "−")


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
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
        for key, summary in found.summaries[label].items():
            numbers = [summary.mean, summary.std, summary.iqm]
            bounds = [*(summary.mean_interval or ("", "")), *(summary.iqm_interval or ("", "")), *summary.range]
            costs = [found.cost(label, name) for name in COSTS]
            writer.writerow([label, key, summary.n, len(found.benchmark.seeds), *numbers, *bounds, *costs])
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
    first, second = _labels(Path(a)), _labels(Path(b))
    shared = [label for label in first if label in second]
    if not shared:
        both = " and ".join(f"{path}: {', '.join(found) or 'a label'}" for path, found in ((a, first), (b, second)))
        raise RL4LMsLikeError(f"nothing to compare, no label is in both ({both}); give RESULTS/LABEL twice")
    short = Path(a).resolve().name, Path(b).resolve().name  # also for `.`
    names = short if short[0] != short[1] else (str(a), str(b))
    asked = [key if ":" in key else f"{split}:{key}" for key in metrics]
    parts = []
    for label in shared:
        there = [key for result in first[label] for key in result.scores if scores_of(second[label], key)]
        known = ", ".join(dict.fromkeys(there)) or "none"
        unknown = [key for key in asked if key not in there]
        if unknown:
            raise RL4LMsLikeError(f"{', '.join(unknown)}: not a metric of both; both have {known}")
        own = [key for key in dict.fromkeys(there) if key.startswith(f"{split}:") and scores_of(first[label], key)]
        if not asked and not own:
            raise RL4LMsLikeError(f"no common metric on the split {split!r}; both have {known}")
        parts += [f"{label}\n"] if label else []
        parts += [_comparison(key, names, first[label], second[label]) for key in asked or own]
    return "\n".join(parts)


def _labels(path: Path) -> dict[str, list[Result]]:
    """Return label -> results of a benchmark. The label is empty for `RESULTS/LABEL` and `RESULTS/runs/LABEL`."""
    if (path / RUNS).is_dir():
        found = {folder.name: _results_in(folder) for folder in sorted((path / RUNS).iterdir())}
    else:
        found = {"": _results_in(path) or _results_in(path.parent / RUNS / path.name)}
    found = {label: results for label, results in found.items() if results}
    if not found:
        raise RL4LMsLikeError(f"{path}: no finished run; expected a benchmark's results folder, or a label in it")
    return found


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
    if min(compared.a.n, compared.b.n) == 1:
        lines.append("  With one seed there are no intervals, and no conclusion about other seeds is possible.")
    elif compared.difference_interval is None:
        lines.append(f"  {FEW_SEEDS}; P is the fraction of pairs among these seeds only.")
    return "\n".join([*lines, ""])
