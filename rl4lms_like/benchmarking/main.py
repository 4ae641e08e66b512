"""Implementation of `rl4lms-like benchmark`, from the spec to the report.

spec ──check──► jobs ──run unfinished ones──► run folders ──collect──► tables, plots, report.html
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
    """Run the unfinished jobs of a benchmark and write its report.

    Args:
        spec_path: YAML file of the spec.
        processes: number of parallel runs, overrides the spec.
        seeds: number of seeds or list of seeds, overrides the spec.
        only: labels to run; the report contains all labels.
        results: results folder, overrides the spec.
        report_only: write the report without running jobs.

    Returns:
        Exit status: 0 if all selected jobs are done, 1 if a run failed, 130 if interrupted.

    Raises:
        ConfigError: the spec or a config has mistakes; nothing was started.
        MissingExtraError: scipy or matplotlib is not installed; nothing was started.
        RL4LMsLikeError: the results folder cannot be written, or another benchmark is running in it.
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
    except BrokenPipeError:  # standard output was closed; not an error of the results folder
        raise
    except OSError as error:
        raise RL4LMsLikeError(f"cannot write results to {asked.results}: {error}") from error
    if outcome.interrupted:
        return INTERRUPTED
    return 1 if outcome.failed else 0


def _report(found: Results, display: Display) -> None:
    """Write tables, plots and `report.html`, and print the tables."""
    write_tables(found)
    display.show("\n" + as_markdown(found))
    curves = learning_curves(found)
    for note in _without_numbers(found, curves):
        display.show(note, "yellow")
    display.show(f"report: {write_report(found, curves)}")


def _without_numbers(found: Results, curves: Sequence[LearningCurves]) -> Iterator[str]:
    """Yield warnings about keys of the spec that no run has, most likely because they are misspelled."""
    if not found.results:
        return
    there = dict.fromkeys(key for result in found.results.values() for key in result.scores)
    for key in [key for key in found.metrics if not any(key in found.summaries[label] for label in found.labels)]:
        yield f"metrics: no run has a value for {key}; available: {', '.join(there)}"
    for key in [curve.spec.key for curve in curves if not curve.lines and found.benchmark.spec.curves]:
        yield f"curves: no run has a value for {key}; available: keys in rollout_info.jsonl, and {', '.join(there)}"
