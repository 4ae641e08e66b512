"""Statistical comparison of two labels or two benchmarks.

    RESULTS/ppo  RESULTS/a2c      two labels of a benchmark
    RESULTS_1    RESULTS_2        two benchmarks: all labels that both have

    test:sentiment/compound
           seeds       mean ± std    IQM  95 % interval of the IQM
      ppo     10    0.712 ± 0.031   0.71  [0.69, 0.73]
      a2c     10    0.624 ± 0.052   0.62  [0.59, 0.65]
      difference of the means 0.088 [0.05, 0.12];  P(ppo > a2c) = 0.93 [0.81, 1]

Whether higher is better depends on the metric. If the interval of P contains 0.5, the seeds do not show which one is
better. With fewer than five seeds, ranges replace the intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl4lms_like.benchmarking.jobs import RESULT_FILE, RUNS, Result, read_result
from rl4lms_like.benchmarking.results import FEW_SEEDS, interval_text, iqm_interval_text, iqm_text, mean_text, scores_of
from rl4lms_like.benchmarking.statistics import Comparison, Summary
from rl4lms_like.benchmarking.statistics import compare as compare_scores
from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.tracking.charts import format_number


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
    if set(first) == {""} and set(second) == {""}:
        return _compared(first[""], second[""], _names(Path(a), Path(b)), metrics, split)
    shared = [label for label in first if label in second]
    if not shared:
        raise RL4LMsLikeError(f"nothing to compare: {_said(a, first)}, {_said(b, second)}; give RESULTS/LABEL twice")
    names = _names(Path(a), Path(b))
    parts = [f"{label}\n\n{_compared(first[label], second[label], names, metrics, split)}" for label in shared]
    return "\n".join(parts)


def comparison_text(key: str, names: tuple[str, str], compared: Comparison) -> str:
    """Format the comparison of one metric."""
    width = max(len(name) for name in names)
    head = f"  {'':{width}}  {'seeds':>5}  {'mean ± std':>18}  {'IQM':>8}  95 % interval of the IQM"
    rows = [_row(name, summary, width) for name, summary in zip(names, (compared.a, compared.b), strict=True)]
    difference = f"{format_number(compared.difference)} {interval_text(compared.difference_interval)}".strip()
    improvement = f"{format_number(compared.improvement)} {interval_text(compared.improvement_interval)}".strip()
    verdict = f"  difference of the means {difference};  P({names[0]} > {names[1]}) = {improvement}"
    if min(compared.a.n, compared.b.n) == 1:
        verdict += "\n  With one seed there are no intervals, and no conclusion about other seeds is possible."
    elif compared.difference_interval is None:
        verdict += f"\n  {FEW_SEEDS}; P is the fraction of pairs among these seeds only."
    return "\n".join([key, head, *rows, verdict, ""])


def results_of(folder: Path) -> list[Result]:
    """Read the results of the finished runs in a label's folder, ordered by seed."""
    results = [read_result(file.parent) for file in folder.glob(f"seed_*/{RESULT_FILE}")]
    return sorted(results, key=lambda result: result.seed)


def _labels(path: Path) -> dict[str, list[Result]]:
    """Return label -> results of a benchmark. The label is empty for `RESULTS/LABEL` and `RESULTS/runs/LABEL`."""
    if (path / RUNS).is_dir():
        found = {folder.name: results for folder in sorted((path / RUNS).iterdir()) if (results := results_of(folder))}
    else:
        results = results_of(path) or results_of(path.parent / RUNS / path.name)
        found = {"": results} if results else {}
    if not found:
        raise RL4LMsLikeError(f"{path}: no finished run; expected a benchmark's results folder, or a label in it")
    return found


def _said(path: str | Path, labels: dict[str, list[Result]]) -> str:
    return f"{path} is a label" if set(labels) == {""} else f"{path} has {', '.join(labels)}"


def _names(a: Path, b: Path) -> tuple[str, str]:
    """Return the names of the folders, or their paths if the names are equal."""
    short = a.resolve().name, b.resolve().name  # also for `.`
    return short if short[0] != short[1] else (str(a), str(b))


def _compared(
    a: Sequence[Result], b: Sequence[Result], names: tuple[str, str], metrics: Sequence[str], split: str
) -> str:
    there = [key for key in dict.fromkeys(key for result in a for key in result.scores) if scores_of(b, key)]
    asked = [key if ":" in key else f"{split}:{key}" for key in metrics]
    unknown = [key for key in asked if key not in there]
    if unknown:
        raise RL4LMsLikeError(f"{', '.join(unknown)}: not a metric of both; both have {', '.join(there) or 'none'}")
    keys = asked or [key for key in there if key.startswith(f"{split}:") and scores_of(a, key)]
    if not keys:
        raise RL4LMsLikeError(f"no common metric on the split {split!r}; both have {', '.join(there) or 'none'}")
    return "\n".join(comparison_text(key, names, compare_scores(scores_of(a, key), scores_of(b, key))) for key in keys)


def _row(name: str, summary: Summary, width: int) -> str:
    middle = f"{summary.n:>5}  {mean_text(summary):>18}  {iqm_text(summary):>8}"
    return f"  {name:{width}}  {middle}  {iqm_interval_text(summary)}".rstrip()
