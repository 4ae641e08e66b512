"""Process of one run of a benchmark: started, watched, and ended so that it saves its state.

Its standard input is a pipe; closing the pipe asks the run to end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import rl4lms_like
from rl4lms_like.benchmarking.jobs import GRACE_S, OUTPUT_FILE, Job, prepare_folder
from rl4lms_like.system.disk import refuse_links

POLL_S = 0.1

_WORKER = (
    "import sys; sys.path[:] = [place for place in sys.path if place] + sys.argv[2:]; "
    "from rl4lms_like.benchmarking.worker import start; start(sys.argv[1])"
)
"""Start of a worker without the current folder in `sys.path`, where `python -m` would also look for modules."""


class RunProcess(Protocol):
    """Process of a run, on this machine or on a cluster."""

    returncode: Any

    def poll(self) -> int | None:
        """Return the exit status; None if the process has not ended."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the process has ended; raise `subprocess.TimeoutExpired` after `timeout` seconds."""

    def ask_to_end(self) -> None:
        """Interrupt the run, so that it saves its state and ends."""

    def kill(self) -> None:
        """End the process immediately."""


class LocalProcess(subprocess.Popen[bytes]):
    """Process of a run on this machine. Its standard input is a pipe."""

    def ask_to_end(self) -> None:
        """Close the pipe."""
        if self.stdin is not None:
            self.stdin.close()

    def kill(self) -> None:
        """End the process with its child processes: it leads its own session."""
        if hasattr(os, "killpg"):
            os.killpg(self.pid, signal.SIGKILL)
        else:
            super().kill()


def start(job: Job, threads: int) -> LocalProcess:
    """Start the process of a job, in a new folder or in that of the stopped run."""
    prepare_folder(job)
    return launch(job.folder, threads)


def launch(
    folder: Path, threads: int, current_folder: str | None = None, variables: Mapping[str, str] | None = None
) -> LocalProcess:
    """Start the process of the job whose folder is prepared.

    Args:
        folder: folder of the run.
        threads: number of threads.
        current_folder: current folder of the process; default: that of this process.
        variables: further environment variables.
    """
    # Numerical libraries read their number of threads when they are loaded. Unbuffered, so that the output of a killed
    # process is complete.
    environment = dict(os.environ)
    environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}

    refuse_links([folder / OUTPUT_FILE])
    with (folder / OUTPUT_FILE).open("ab") as output:
        return LocalProcess(
            [sys.executable, "-c", _WORKER, str(folder), str(Path(rl4lms_like.__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | dict(variables or {}),
            cwd=current_folder,
            start_new_session=True,  # Ctrl-C is sent only to the runner, which ends the runs
        )


def end(processes: Sequence[RunProcess]) -> None:
    """Ask the runs to end, wait until they have saved their state, and kill those that do not end in time."""
    for process in processes:
        process.ask_to_end()

    # All save at the same time, so the deadline is one for all. A second Ctrl-C ends the waiting.
    deadline = time.monotonic() + GRACE_S
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        remaining = [process for process in processes if process.poll() is None]
        for process in remaining:
            process.kill()
            process.wait()
