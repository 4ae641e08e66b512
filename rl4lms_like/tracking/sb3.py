"""Logger of Stable-Baselines3 whose dumps are passed to the tracker.

    algorithm.logger.record("ppo/value_loss", ...)   any number of times
    algorithm.logger.dump(step=num_timesteps)        once per iteration -> TrackerWriter.write -> all sinks

Algorithms do not depend on the tracker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO, cast

from stable_baselines3.common.logger import HumanOutputFormat, KVWriter, Logger

if TYPE_CHECKING:
    from rl4lms_like.tracking.base import Tracker


class TrackerWriter(KVWriter):
    """Writer that passes the dumps of SB3's logger to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Pass the values to the tracker; `key_excluded` maps a key to the sinks that do not receive it."""
        self.tracker.log_values(dict(key_values), timesteps=step, excluded=dict(key_excluded))

    def close(self) -> None:
        """Do nothing: the tracker closes its own sinks."""


class ConsoleStream:
    """Text stream that prints above the live display."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def write(self, text: str) -> int:
        """Print `text` and return its length."""
        self.tracker.print(text.rstrip("\n"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: output is not buffered."""


def make_logger(tracker: Tracker, *, verbose: int = 0) -> Logger:
    """Return a logger whose dumps go to the tracker; with `verbose` they are also printed as SB3's table."""
    writers: list[KVWriter] = [TrackerWriter(tracker)]
    if verbose:
        writers.append(HumanOutputFormat(cast(TextIO, ConsoleStream(tracker)), max_length=50))
    return Logger(folder=str(tracker.run_path), output_formats=writers)
