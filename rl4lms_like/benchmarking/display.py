"""Progress display of a running benchmark.

    on a terminal                                            otherwise, one line per run
      benchmark  ━━━━━━━━━━╸━━━━━━━  12/40  0:09:12 left       12/40  ppo, seed 3: done in 0:41   0:09:12 left
      running: ppo, seed 4 · a2c, seed 4

A failed run is shown with the end of its output and the path of the complete output.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from rl4lms_like.benchmarking.jobs import OUTPUT_FILE, Job, State, last_lines
from rl4lms_like.tracking.console import RunConsole, duration


class Display:
    """Shows the progress of a benchmark.

    Args:
        name: name of the benchmark.
        console: console to print to; default: standard output.
    """

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.console = console or RunConsole(highlight=False)
        self._progress = Progress(
            *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn()),
            *(TextColumn("[dim]{task.fields[left]}"),),
            console=self.console,
            expand=True,
        )
        self._name = name
        self._live: Live | None = None
        self._running: dict[str, float] = {}
        self._seconds: list[float] = []
        self._n_jobs, self._n_over, self._processes = 0, 0, 1

    def start(self, n_jobs: int, states: Sequence[State], processes: int) -> None:
        """Show the number of runs and their states, and start the progress bar."""
        counts: Counter[str] = Counter(states)
        self._n_jobs, self._n_over, self._processes = n_jobs, counts["done"], processes
        words = {
            "done": "already done",
            "changed": "with a changed config",
            "stopped": "to resume",
            "unfinished": "to restart",
        }
        known = [f"{counts[state]} {text}" for state, text in words.items() if counts[state]]
        what = ", ".join([f"{n_jobs} run{'s' if n_jobs != 1 else ''}", *known, f"{processes} at a time"])
        self.show(f"{self._name}: {what}")
        if self.console.is_terminal and self._n_over < n_jobs:
            self._progress.add_task(self._name, total=n_jobs, completed=self._n_over, left="")
            self._live = Live(get_renderable=self._frame, console=self.console)
            self._live.start()

    def started(self, job: Job) -> None:
        """Show that a run has started."""
        self._running[job.name] = time.monotonic()

    def ended(self, job: Job, failed: int | None, seconds: float) -> None:
        """Show that a run has ended; `failed` is its exit status if it has no result."""
        del self._running[job.name]
        self._n_over += 1
        if failed is None:
            self._seconds.append(seconds)
        if self._live is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._n_over, left=f"{self.left()} left")
        if failed is not None:
            self._show_failure(job, failed)
        elif self._live is None:
            head = f"{self._n_over:>4}/{self._n_jobs}"
            self.show(f"{head}  {job.name}: done in {duration(seconds)}; {self.left()} left")

    def interrupted(self, n_running: int) -> None:
        """Show that Ctrl-C was received."""
        self.stop()
        if n_running:
            going = "saving the state of 1 run" if n_running == 1 else f"saving the states of {n_running} runs"
            self.show(f"interrupted: {going}; press Ctrl-C again to stop immediately")

    def stop(self) -> None:
        """Stop the live display, which restores the cursor."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, text: str, style: str = "") -> None:
        """Print lines above the live display, without wrapping."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def left(self) -> str:
        """Estimate the remaining time from the runs that have ended; `-` before the first."""
        if not self._seconds:
            return "-"
        mean = sum(self._seconds) / len(self._seconds)
        spent = sum(min(time.monotonic() - began, mean) for began in self._running.values())
        return duration(((self._n_jobs - self._n_over) * mean - spent) / self._processes)

    def _show_failure(self, job: Job, status: int) -> None:
        self.show(f"{job.name}: FAILED with status {status}", "bold red")
        for line in last_lines(job.folder):
            self.show(f"    {line}", "red")
        self.show(f"    full output: {job.folder / OUTPUT_FILE}")

    def _frame(self) -> Group:
        names = " · ".join(self._running) or "nothing"
        return Group(self._progress, Text(f"  running: {names}", style="dim", no_wrap=True, overflow="ellipsis"))
