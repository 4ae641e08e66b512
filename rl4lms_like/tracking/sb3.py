"""Stable-Baselines3's side: algorithms record into its `Logger`, and one `KVWriter` hands every dump to the tracker.

    algorithm.logger.record("ppo/value_loss", ...)   any number of times
    algorithm.logger.dump(step=num_timesteps)        once an iteration -> TrackerWriter.write -> all sinks

No algorithm knows a tracker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO, cast

from stable_baselines3.common.logger import HumanOutputFormat, KVWriter, Logger

if TYPE_CHECKING:
    from rl4lms_like.tracking.base import Tracker


class TrackerWriter(KVWriter):
    """Hands what SB3's logger dumps to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Called by `Logger.dump`; `key_excluded` names, for each key, the sinks that shall not get it."""
        self.tracker.log_values(dict(key_values), timesteps=step, excluded=dict(key_excluded))

    def close(self) -> None:
        """Nothing to do: the tracker outlives the logger, and closes its own sinks."""


class ConsoleStream:
    """A text stream that prints above the live display."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def write(self, text: str) -> int:
        """Prints `text`, and returns its length as streams do."""
        self.tracker.print(text.rstrip("\n"))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


def make_logger(tracker: Tracker, *, verbose: int = 0) -> Logger:
    """A logger whose dumps reach the tracker; with `verbose` they are printed as SB3's table as well."""
    writers: list[KVWriter] = [TrackerWriter(tracker)]
    if verbose:
        writers.append(HumanOutputFormat(cast(TextIO, ConsoleStream(tracker)), max_length=50))
    return Logger(folder=str(tracker.run_path), output_formats=writers)
