"""Runs jobs in processes of their own, so many side by side, and survives what they do.

    jobs ──state_of──► to do ──► [process] [process] ──► done | failed
                                     ▲ stdin: a pipe; closing it asks the run to end

A run that fails is named, and the others go on. Ctrl-C starts nothing more and lets the runs that go on save what they
have; a second one ends them at once.
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
"""A process that looks for modules where packages are, not in the current folder, as `-m` would."""


@dataclass
class Outcome:
    """What became of the jobs.

    Args:
        done: ended well, now or before.
        failed: ended with another status.
        interrupted: whether Ctrl-C cut the benchmark short.
    """

    done: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    interrupted: bool = False


def run_jobs(jobs: Sequence[Job], processes: int, *, threads: int, display: Display) -> Outcome:
    """Runs the jobs that are not done.

    Args:
        jobs: in the order they shall start.
        processes: side by side.
        threads: of each.
        display: hears what happens.
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
    """Starts a job's process, in a fresh folder or where the job was stopped."""
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
            start_new_session=True,  # Ctrl-C reaches the runner alone, and the runner ends the runs
        )


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks the runs to end, waits for them to save what they have, and ends those that do not."""
    for process in processes:
        _hang_up(process)
    deadline = time.monotonic() + GRACE_S
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass  # whatever is left is ended below
    finally:
        for process in processes:
            if process.poll() is None:
                _kill(process)


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)  # the process leads a session of its own
    else:
        process.kill()
    process.wait()
