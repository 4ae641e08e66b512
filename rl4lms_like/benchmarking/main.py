"""`rl4lms-like benchmark`: from a spec to its report.

spec ──check──► jobs ──run what is not done──► run folders ──collect──► tables, plots, report.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rl4lms_like.benchmarking.curves import LearningCurves, learning_curves
from rl4lms_like.benchmarking.display import Display
from rl4lms_like.benchmarking.jobs import claimed, jobs_of
from rl4lms_like.benchmarking.report import write_report
from rl4lms_like.benchmarking.results import Results, as_markdown, collect, write_tables
from rl4lms_like.benchmarking.runner import Outcome, run_jobs
from rl4lms_like.benchmarking.spec import load_benchmark
from rl4lms_like.core.errors import RL4LMsLikeError, import_extra

INTERRUPTED = 130


def benchmark(
    spec_path: str | Path,
    *,
    processes: int | None = None,
    seeds: int | list[int] | None = None,
    only: Sequence[str] = (),
    results: str | Path | None = None,
    report_only: bool = False,
) -> int:
    """Runs what is not done of a benchmark, and reports what is there.

    Args:
        spec_path: the spec.
        processes: side by side, instead of the spec's.
        seeds: how many or which, instead of the spec's.
        only: labels to run; the report has all.
        results: folder, instead of the spec's.
        report_only: run nothing.

    Returns:
        Exit status: 0 all that was asked for is done, 1 a run failed, 130 interrupted.

    Raises:
        ConfigError: mistakes in the spec or in a config; nothing was started.
        MissingExtraError: scipy or matplotlib is not installed; nothing was started.
        RL4LMsLikeError: the results folder cannot be written, or another benchmark runs in it.
    """
    asked = load_benchmark(spec_path, seeds=seeds, results=results)
    jobs = jobs_of(asked, only)
    for package in ("scipy", "matplotlib"):
        import_extra(package, extra="benchmark", needed_by="a benchmark's report")
    display = Display(asked.name)
    outcome = Outcome()
    try:
        if not report_only:
            with claimed(asked.results):
                outcome = run_jobs(jobs, processes or asked.spec.processes, threads=asked.spec.threads, display=display)
        _report(collect(asked), display)
    except BrokenPipeError:  # not the folder's: nobody reads what is printed
        raise
    except OSError as error:
        raise RL4LMsLikeError(f"cannot keep results in {asked.results}: {error}") from error
    if outcome.interrupted:
        return INTERRUPTED
    return 1 if outcome.failed else 0


def _report(found: Results, display: Display) -> None:
    """Writes tables, plots and page, and shows the tables."""
    write_tables(found)
    display.show("\n" + as_markdown(found))
    curves = learning_curves(found)
    for note in _without_numbers(found, curves):
        display.show(note, "yellow")
    display.show(f"report: {write_report(found, curves)}")


def _without_numbers(found: Results, curves: Sequence[LearningCurves]) -> Iterator[str]:
    """What the spec names and no run has: most likely a misspelt key."""
    if not found.results:
        return
    there = dict.fromkeys(key for result in found.results.values() for key in result.scores)
    for key in [key for key in found.metrics if not any(key in found.summaries[label] for label in found.labels)]:
        yield f"metrics: no run has a number for {key}; there are {', '.join(there)}"
    for key in [curve.spec.key for curve in curves if not curve.lines and found.benchmark.spec.curves]:
        yield f"curves: no run has a number for {key}; see a run's rollout_info.jsonl, and {', '.join(there)}"
