"""Implementation of `rl4lms-like benchmark`, from the spec to the report. Jobs run in parallel processes.

    spec ──check──► jobs ──state_of──► to do ──► [process] [process] ──► run folders ──collect──► tables, report.html
                                                     ▲ stdin: a pipe; closing it asks the run to end

    on a terminal                                            otherwise, one line per run
      benchmark  ━━━━━━━━━━╸━━━━━━━  12/40  0:09:12 left       12/40  ppo, seed 3: done in 0:41   0:09:12 left
      running: ppo, seed 4 · a2c, seed 4

A failed run is shown with the end of its output and the path of the complete output, and the other runs continue.
After Ctrl-C no more runs are started, and the active ones save their state. A second Ctrl-C kills them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from rl4lms_like.benchmarking.jobs import OUTPUT_FILE, Job, State, claimed, jobs_of, last_lines, state_of
from rl4lms_like.benchmarking.processes import POLL_S, RunProcess, end, start
from rl4lms_like.benchmarking.report import LearningCurves, learning_curves, write_report
from rl4lms_like.benchmarking.results import Results, as_markdown, collect, write_tables
from rl4lms_like.benchmarking.spec import load_benchmark
from rl4lms_like.system.errors import RL4LMsLikeError, import_extra
from rl4lms_like.tracking.charts import duration
from rl4lms_like.tracking.console import LiveBar, RunConsole

INTERRUPTED = 130


def benchmark(
    spec_path: str | Path,
    *,
    processes: int | None = None,
    seeds: int | list[int] | None = None,
    only: Sequence[str] = (),
    results: str | Path | None = None,
    report_only: bool = False,
    ray: str | None = None,
) -> int:
    """Run the unfinished jobs of a benchmark and write its report.

    Args:
        spec_path: YAML file of the spec.
        processes: number of parallel runs, overrides the spec.
        seeds: number of seeds or list of seeds, overrides the spec.
        only: labels to run; the report contains all labels.
        results: results folder, overrides the spec.
        report_only: write the report without running jobs.
        ray: address of a Ray cluster that runs the jobs, as for `ray.init`. As many as it has resources for are run in
            parallel, unless `processes` is given; default: processes on this machine.

    Returns:
        Exit status: 0 if all selected jobs are done, 1 if a run failed, 130 if interrupted.

    Raises:
        ConfigError: the spec or a config has errors, or the Ray cluster cannot run it; nothing was started.
        MissingExtraError: scipy, matplotlib or Ray is not installed; nothing was started.
        RL4LMsLikeError: the results folder cannot be written, or another benchmark is running in it.
    """
    # Before the first run: errors of the spec and the configs, and packages that would be missing after hours.
    plan = load_benchmark(spec_path, seeds=seeds, results=results)
    jobs = jobs_of(plan, only)
    for package in ("scipy", "matplotlib"):
        import_extra(package, extra="benchmark", needed_by="a benchmark's report")
    if ray is not None:
        import_extra("ray", extra="ray", needed_by="--ray")
        from rl4lms_like.benchmarking.ray_cluster import connected

    display = Display(plan.name)
    status = 0
    try:
        # The folder is locked before the cluster is connected, which writes a file into it.
        if not report_only:
            on_cluster = connected(ray, plan, display.show) if ray is not None else nullcontext()
            with claimed(plan.results), on_cluster as cluster:
                status = run_jobs(
                    jobs,
                    processes or (cluster.n_slots if cluster else plan.spec.processes),
                    threads=plan.spec.threads,
                    display=display,
                    begin=cluster.start if cluster else start,
                )

        # Also after failed runs or Ctrl-C: the report has the results so far, and names what is missing.
        so_far = collect(plan)
        write_tables(so_far)
        display.show("\n" + as_markdown(so_far))
        curves = learning_curves(so_far)
        for warning in _keys_without_values(so_far, curves):
            display.show(warning, "yellow")
        display.show(f"report: {write_report(so_far, curves)}")
    except BrokenPipeError:  # standard output was closed; not an error of the results folder
        raise
    except OSError as error:
        raise RL4LMsLikeError(f"cannot write results to {plan.results}: {error}") from error
    return status


def _keys_without_values(results: Results, curves: Sequence[LearningCurves]) -> Iterator[str]:
    """Yield warnings about keys of the spec that no run has, most likely because they are misspelled."""
    if not results.finished:  # nothing has a value yet
        return
    keys_of_runs: dict[str, None] = {}  # each once, in order
    for result in results.finished.values():
        keys_of_runs |= dict.fromkeys(result.scores)
    available = ", ".join(keys_of_runs)
    for key in results.metrics:
        if not any(key in results.summaries[label] for label in results.labels):
            yield f"metrics: no run has a value for {key}; available: {available}"

    # Default curves may be empty: supervised runs, for instance, have no reward.
    if not results.benchmark.spec.curves:
        return
    for curve in curves:
        if not curve.lines:
            keys = f"keys in rollout_info.jsonl, and {available}"
            yield f"curves: no run has a value for {curve.spec.key}; available: {keys}"


@dataclass(frozen=True)
class RunningJob:
    """Job with its process, and the time at which it began (`time.monotonic`)."""

    job: Job
    process: RunProcess
    began: float


def run_jobs(
    jobs: Sequence[Job], processes: int, *, threads: int, display: Display, begin: Callable[[Job, int], RunProcess]
) -> int:
    """Run the jobs that are not done, in their order, and return the exit status, as `benchmark`.

    Args:
        jobs: all jobs.
        processes: number of parallel processes.
        threads: number of threads per process.
        display: progress display.
        begin: starts the process of a job, with this number of threads.
    """
    states = [state_of(job) for job in jobs]
    waiting = [job for job, state in zip(jobs, states, strict=True) if state != "done"]
    running: list[RunningJob] = []
    status = 0
    display.start(states, processes)
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running.append(RunningJob(job, begin(job, threads), time.monotonic()))
                display.started(job)
            time.sleep(POLL_S)

            ended = [run for run in running if run.process.poll() is not None]
            for run in ended:
                running.remove(run)
                run.process.ask_to_end()  # closes the runner's end of its pipe

                # The result decides: the exit status may be that of an error after the result was written.
                failed_with = None
                if state_of(run.job) != "done":
                    failed_with = run.process.returncode
                    status = 1
                display.ended(run.job, failed_with, time.monotonic() - run.began)
    except KeyboardInterrupt:
        status = INTERRUPTED
        display.interrupted(len(running))
    finally:
        # However the loop ends: no run continues without its benchmark.
        end([run.process for run in running])
        display.stop()
    return status


class Display:
    """Shows the progress of a benchmark on standard output.

    Args:
        name: name of the benchmark.
    """

    def __init__(self, name: str) -> None:
        self.console = RunConsole(highlight=False)
        self._name = name
        self._running: dict[str, float] = {}
        self._seconds: list[float] = []  # durations of the runs that have ended without an error
        self._n_jobs = 0
        self._n_ended = 0  # with those that were done before
        self._processes = 1
        self._bar = LiveBar(self.console, self._names)

    def start(self, states: Sequence[State], processes: int) -> None:
        """Show the number of runs and their states, and start the progress bar."""
        counts = Counter(states)
        self._n_jobs = len(states)
        self._n_ended = counts["done"]
        self._processes = processes

        # New runs are not counted here: a benchmark that starts for the first time has only those.
        descriptions: dict[State, str] = {"done": "already done", "changed": "with a changed config"}
        descriptions |= {"stopped": "to resume", "unfinished": "to restart"}
        facts = ["1 run" if self._n_jobs == 1 else f"{self._n_jobs} runs"]
        facts += [f"{counts[state]} {description}" for state, description in descriptions.items() if counts[state]]
        facts.append(f"{processes} at a time")
        self.show(f"{self._name}: {', '.join(facts)}")

        if self._n_ended < self._n_jobs:
            self._bar.begin(self._name, self._n_jobs, self._n_ended)

    def started(self, job: Job) -> None:
        """Show that a run has started."""
        self._running[job.name] = time.monotonic()

    def ended(self, job: Job, failed_with: int | None, seconds: float) -> None:
        """Show that a run has ended; `failed_with` is its exit status if it has no result."""
        # A failed run may have ended within seconds: it says nothing about the time that the others need.
        del self._running[job.name]
        self._n_ended += 1
        if failed_with is None:
            self._seconds.append(seconds)
        has_bar = self._bar.move(self._n_ended, self.left())

        # On a terminal the bar is enough for a run that is done.
        if failed_with is not None:
            self.show(f"{job.name}: FAILED with status {failed_with}", "bold red")
            for line in last_lines(job.folder):
                self.show(f"    {line}", "red")
            self.show(f"    full output: {job.folder / OUTPUT_FILE}")
        elif not has_bar:
            head = f"{self._n_ended:>4}/{self._n_jobs}"
            self.show(f"{head}  {job.name}: done in {duration(seconds)}; {self.left()} left")

    def interrupted(self, n_running: int) -> None:
        """Show that Ctrl-C was received."""
        self.stop()
        if n_running:
            task = "saving the state of 1 run" if n_running == 1 else f"saving the states of {n_running} runs"
            self.show(f"interrupted: {task}; press Ctrl-C again to stop immediately")

    def stop(self) -> None:
        """Stop the live display, which restores the cursor."""
        self._bar.stop()

    def show(self, text: str, style: str = "") -> None:
        """Print lines above the live display, without wrapping."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def left(self) -> str:
        """Estimate the remaining time from the runs that have ended; `-` before the first."""
        if not self._seconds:
            return "-"

        # (remaining runs x mean duration - time that the running ones have spent) / processes. A run that takes longer
        # than the mean counts as finished, and does not make the others shorter.
        mean = sum(self._seconds) / len(self._seconds)
        spent = sum(min(time.monotonic() - began, mean) for began in self._running.values())
        return duration(((self._n_jobs - self._n_ended) * mean - spent) / self._processes)

    def _names(self) -> Text:
        names = " · ".join(self._running) or "nothing"
        return Text(f"  running: {names}", style="dim", no_wrap=True, overflow="ellipsis")
