"""Execution of jobs in separate processes, several in parallel.

    jobs ──state_of──► to do ──► [process] [process] ──► done | failed
                                     ▲ stdin: a pipe; closing it asks the run to end

A failed run is reported, and the other runs continue. After Ctrl-C no more runs are started, and the active ones save
their state. A second Ctrl-C kills them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rl4lms_like
from rl4lms_like.benchmarking.display import Display
from rl4lms_like.benchmarking.jobs import GRACE_S, OUTPUT_FILE, Job, prepare_folder, state_of
from rl4lms_like.core.disk import refuse_links

POLL_S = 0.1

_WORKER = (
    "import sys; sys.path[:] = [place for place in sys.path if place] + sys.argv[2:]; "
    "from rl4lms_like.benchmarking.worker import start; start(sys.argv[1])"
)
"""Start of a worker without the current folder in `sys.path`, where `python -m` would also look for modules."""


@dataclass
class Outcome:
    """Outcome of the jobs.

    Args:
        done: jobs that finished, now or earlier.
        failed: jobs whose process ended without a result.
        interrupted: whether the benchmark was interrupted by Ctrl-C.
    """

    done: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    interrupted: bool = False


def run_jobs(jobs: Sequence[Job], processes: int, *, threads: int, display: Display) -> Outcome:
    """Run the jobs that are not done.

    Args:
        jobs: jobs in the order in which they are started.
        processes: number of parallel processes.
        threads: number of threads per process.
        display: progress display.
    """
    states = {job.name: state_of(job) for job in jobs}
    outcome = Outcome(done=[job for job in jobs if states[job.name] == "done"])
    waiting = [job for job in jobs if states[job.name] != "done"]
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
    display.start(len(jobs), list(states.values()), processes)
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running.append((job, start(job, threads), time.monotonic()))
                display.started(job)
            time.sleep(POLL_S)
            for entry in [entry for entry in running if entry[1].poll() is not None]:
                running.remove(entry)
                job, process, began = entry
                _hang_up(process)
                is_done = state_of(job) == "done"
                (outcome.done if is_done else outcome.failed).append(job)
                display.ended(job, None if is_done else process.returncode, time.monotonic() - began)
    except KeyboardInterrupt:
        outcome.interrupted = True
        display.interrupted(len(running))
    finally:
        end([process for _, process, _ in running])
        display.stop()
    return outcome


def start(job: Job, threads: int) -> subprocess.Popen[bytes]:
    """Start the process of a job, in a new folder or in that of the stopped run."""
    prepare_folder(job)
    number = str(threads)
    environment = {**os.environ, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number, "PYTHONUNBUFFERED": "1"}
    refuse_links([job.folder / OUTPUT_FILE])
    with (job.folder / OUTPUT_FILE).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(job.folder), str(Path(rl4lms_like.__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is sent only to the runner, which ends the runs
        )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the runs to end, wait until they have saved their state, and kill those that do not end in time."""
    for process in processes:
        _hang_up(process)
    deadline = time.monotonic() + GRACE_S
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass  # remaining processes are killed below
    finally:
        for process in processes:
            if process.poll() is None:
                _kill(process)


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its child processes."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)  # the process is the leader of its own session
    else:
        process.kill()
    process.wait()
