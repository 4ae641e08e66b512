"""Console output during a run.

    on a terminal                                          otherwise, one line per iteration
      (notices and evaluation tables scroll up here)         iteration    reward        KL     coeff  entropy  ...
      ppo  ━━━━━━━━━━━━╸━━━━━━━  12/25  0:00:24 left              1/25     0.082    0.0000    0.1000    2.610  ...
      reward 0.612 ▁▂▃▅▆▇  KL 0.113 (coeff 0.098) ...

In a notebook with ipywidgets, a widget shows the bar and the line of numbers. With `quiet` only warnings are shown.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from rl4lms_like.system.secrets import without_secrets
from rl4lms_like.system.wording import accept_any_character, printable
from rl4lms_like.tracking.charts import duration
from rl4lms_like.tracking.notebook import WidgetBar, is_notebook, widget_bar
from rl4lms_like.tracking.record import dialogue_parts
from rl4lms_like.tracking.run_folder import ROLLOUT_GROUPS, first_scores
from rl4lms_like.tracking.sink import Epoch, Predictions, RunDescription, Sink

BLOCKS = "▁▂▃▄▅▆▇█"
HEADER_EVERY = 40
"""Number of lines after which the header is printed again: less than a usual window has."""

SPARK_WIDTH = 24
LONGEST_IN_SHORT = 160
"""Maximum number of characters of an `in_short` message: two lines of the table."""

LONGEST_EPISODE = 800
"""Maximum number of characters of an episode."""

MORE = " ... (more in log.txt and report.html)"
"""Suffix of a shortened message."""


@dataclass(frozen=True)
class Column:
    """Number in the progress line: its label, its keys and its format."""

    label: str
    keys: tuple[str, ...]
    format: str

    def value(self, values: Mapping[str, Any]) -> float | None:
        """Return the value of the first key that is present, or None."""
        return next((float(values[key]) for key in self.keys if key in values), None)

    def text(self, values: Mapping[str, Any]) -> str:
        """Return the formatted number, or a dash."""
        value = self.value(values)
        return "-" if value is None else format(value, self.format)


REWARD = Column("reward", ("rollout_info/ep_rew", "rollout/ep_rew_mean"), ".3f")
KL = Column("KL", ("rollout_info/kl_div_mean",), ".4f")
COEFF = Column("coeff", ("rollout_info/kl_coeff",), ".4f")
ENTROPY = Column("entropy", ("rollout_info/entropy",), ".3f")
VALUE_LOSS = Column("value loss", ("ppo/value_loss", "train/value_loss"), ".4f")
SPEED = Column("tokens/s", ("time/tokens_per_s", "time/fps"), ",.0f")
COLUMNS = (REWARD, KL, COEFF, ENTROPY, VALUE_LOSS, SPEED)
LOSS = Column("loss", ("supervised/loss", "preference/loss"), ".4f")
SUPERVISED = (
    LOSS,
    Column("val loss", ("supervised/val_loss", "preference/val_loss"), ".4f"),
    Column("lr", ("train/learning_rate",), ".2e"),
    Column("steps/s", ("time/steps_per_s",), ".2f"),
)
"""Columns of a run without rollouts."""


class RunConsole(Console):
    """Console that stops printing if the pipe is closed (`... | head`), the terminal is gone or the disk is full.

    Rich's own console ends the process or raises. Characters outside standard output's encoding are escaped.
    """

    def __init__(self, **options: Any) -> None:
        accept_any_character(sys.stdout)
        # In a notebook, rich would make an output of its own for each line that is printed. Its standard output says
        # that it is a terminal, but does not move a cursor.
        if is_notebook():
            options["force_terminal"] = False
        super().__init__(force_jupyter=False, **options)

    def on_broken_pipe(self) -> None:
        """Redirect all further output to the null device."""
        self.quiet = True
        # Python flushes standard output at its end, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        except OSError:
            self.on_broken_pipe()


class LiveBar(Progress):
    """Progress bar, on terminals only, with the line of text that `below` returns; restores the cursor at the end."""

    def __init__(self, console: Console, below: Callable[[], Text]) -> None:
        self._below = below
        super().__init__(
            *(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn()),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
            expand=True,
            refresh_per_second=4,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and the line."""
        yield from super().get_renderables()
        yield self._below()

    def begin(self, name: str, total: int, completed: int) -> None:
        """Show the bar if the console is a terminal."""
        if not self.console.is_terminal or self.live.is_started:
            return
        self.add_task(name, total=total, completed=completed, left="")
        self.start()

        # rich hides the cursor: a program that ends without `stop` would leave the terminal without one.
        atexit.register(self.stop)

    def move(self, completed: int, left: str) -> bool:
        """Show progress and the remaining time; return False if the bar is not shown."""
        if self.live.is_started:
            self.update(self.task_ids[0], completed=completed, left=f"{left} left")
        return self.live.is_started

    def stop(self) -> None:
        self.live.stop()  # `Progress.stop` would also print an empty line
        atexit.unregister(self.stop)


class ConsoleSink(Sink):
    """Sink that shows progress, or only warnings with `quiet`, on the console, by default on standard output."""

    name = "stdout"

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or RunConsole(highlight=False)
        self.quiet = quiet
        self._name = ""
        self._values: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._first_scores: dict[str, dict[str, Any]] = {}

        # Iterations before a resume took no time in this process: the remaining time is estimated without them.
        self._n_iters = 0
        self._completed = 0
        self._iteration = 0
        self._began = time.monotonic()
        self._n_lines = 0
        self._bar: LiveBar | WidgetBar = widget_bar(self._numbers) or LiveBar(self.console, self._numbers)

    def open(self, run: RunDescription) -> None:
        self._name = run.experiment
        self._first_scores = first_scores(run.path)  # of a resumed run

    def start(self, n_iters: int, completed: int = 0) -> None:
        self._n_iters = n_iters
        self._completed = completed
        self._iteration = completed
        self._began = time.monotonic()
        if not self.quiet:
            self._bar.begin(self._name, n_iters, completed)

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        # For the row of blocks; here and not in `advance`, which is also called between two writes.
        reward = REWARD.value(values)
        if reward is not None and math.isfinite(reward):
            self._rewards.append(reward)
        self.advance(iteration, values)

    def advance(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Show the number of completed iterations, and values of a rollout or a loss; without a terminal, as a line."""
        self._iteration = iteration
        self._values.update(values)
        if self._bar.move(iteration, self._left()):
            return

        # One line for each iteration: values of an update alone get none, and are shown with the next rollout.
        if any(key.startswith(ROLLOUT_GROUPS) for key in values):
            self._line("iteration", COLUMNS)
        elif LOSS.value(values) is not None:
            self._line("step", SUPERVISED)

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        first = self._first_scores.setdefault(split_name, dict(metrics))
        if self.quiet or not metrics:
            return

        is_first = first == dict(metrics)
        table = Table(box=None, padding=(0, 1, 0, 1), header_style="bold")
        table.add_column(f"{split_name}, epoch {epoch}", min_width=24)
        table.add_column("score", justify="right", min_width=9)
        if not is_first:
            table.add_column("at first", justify="right", min_width=9, style="dim", header_style="dim")

        # `Text`, not a plain text: rich would read brackets in a key as markup.
        for key, score in metrics.items():
            cells: list[Text | str] = [Text(printable(key)), _score(score)]
            if not is_first:
                cells.append(_score(first.get(key)))
            table.add_row(*cells)
        self.console.print(Text(), table)
        self._n_lines = 0  # the next line has the header again

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        # One episode of a run with an environment that answers, whose texts are grey. Below the table of the scores.
        turns = dialogue_parts(predictions[0].get("turns")) if predictions else []
        if self.quiet or not turns:
            return
        episode = Text(" first episode   ")
        for number, (is_observed, text) in enumerate([(True, str(predictions[0]["prompt_text"])), *turns]):
            mark = "env: " if is_observed else ""
            line = printable(without_secrets(f"{mark}{text.strip()}".replace("\n", "⏎")))
            episode.append(" | " if number else "", style="dim")
            episode.append(line, style="bright_black" if is_observed else "")
        episode.truncate(LONGEST_EPISODE, overflow="ellipsis")
        self.console.print(episode, soft_wrap=True)

    def print(self, text: str) -> None:
        """Print text unchanged, above the live display."""
        if not self.quiet:
            self.show(Text(text))

    def show(self, text: Text) -> None:
        """Print a message, quiet or not, without breaking its lines."""
        text.plain = printable(without_secrets(text.plain))
        self.console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Stop the live display."""
        self._bar.stop()

    def _numbers(self) -> Text:
        """Return the line below the bar: the last values, and the rewards so far as a row of blocks."""
        numbers = Text("  ", no_wrap=True, overflow="ellipsis")
        room = self.console.width - 76  # columns that the numbers leave for the blocks
        columns = (REWARD, KL, ENTROPY, SPEED) if LOSS.value(self._values) is None else SUPERVISED

        for column in columns:
            if column.value(self._values) is None:
                continue
            numbers.append(f"{column.label} ", style="dim").append(column.text(self._values), style="bold")
            if column is REWARD and room > 0:
                numbers.append(f" {sparkline(self._rewards[-min(room, SPARK_WIDTH) :])}", style="cyan")
            if column is KL:
                numbers.append(f" (coeff {COEFF.text(self._values)})", style="dim")
            numbers.append("   ")
        return numbers

    def _line(self, unit: str, columns: Sequence[Column]) -> None:
        """Print the last values as a line of the table, `unit` being what is counted."""
        progress = f"{self._iteration}/{self._n_iters}" if self._n_iters else str(self._iteration)
        cells = {unit: progress}
        for column in columns:
            cells[column.label] = column.text(self._values)
        cells["left"] = self._left()

        if self._n_lines % HEADER_EVERY == 0:
            self.print("\n" + "".join(f"{label:>11}" for label in cells))
        self.print("".join(f"{text:>11}" for text in cells.values()))
        self._n_lines += 1

    def _left(self) -> str:
        """Return the remaining time, or a dash if it cannot be estimated."""
        n_done = self._iteration - self._completed
        n_left = self._n_iters - self._iteration
        if n_done <= 0 or n_left < 0:
            return "-"
        return duration((time.monotonic() - self._began) / n_done * n_left)


class ConsoleHandler(logging.Handler):
    """Logging handler that shows the library's messages above the live display.

    Messages marked `file_only` are skipped. Messages marked `in_short` are shortened to two lines of the table.
    """

    def __init__(self, sink: ConsoleSink) -> None:
        super().__init__()
        self.sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        if getattr(record, "file_only", False):
            return
        style = {logging.WARNING: "yellow", logging.ERROR: "bold red"}.get(record.levelno, "")
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        message = record.getMessage()

        # Shortened at the end of a word.
        if getattr(record, "in_short", False) and len(message) > LONGEST_IN_SHORT:
            message = message[: LONGEST_IN_SHORT - len(MORE)].rpartition(" ")[0] + MORE
        self.sink.show(Text(prefix + message, style=style))


def sparkline(values: list[float]) -> str:
    """Return the values as a row of block characters, scaled from the lowest to the highest."""
    if not values:
        return ""
    low = min(values)
    high = max(values)
    if not high > low:
        return BLOCKS[0] * len(values)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / (high - low) * top)] for value in values)


def _score(score: Any) -> str:
    if isinstance(score, (int, float)):
        return f"{score:.4g}"
    return "-" if score is None else str(score)  # a text is `n/a`
