"""One place where a run's numbers go. A tracker hands every event to all of its sinks.

    write             what one iteration measured, `rollout_info/*`, `ppo/*`, `train/*`, `time/*`
    log_metrics       the scores of one evaluation
    log_predictions   its texts

A sink that raises is reported once and the run goes on: only the run folder's own errors end a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Epoch: TypeAlias = "int | float"
Predictions: TypeAlias = "Sequence[Mapping[str, Any]]"


@dataclass(frozen=True)
class RunDescription:
    """What a sink may want to know about the run.

    Args:
        path: the run folder.
        project: name of the project.
        experiment: name of the experiment; the folder's name, so `sentiment_2` if `sentiment` was taken.
        config: the run's config as plain data.
        entity: the account or team in a tracking service.
    """

    path: Path
    project: str
    experiment: str
    config: Mapping[str, Any] = field(default_factory=dict)
    entity: str | None = None


class Sink:
    """What a user subclasses to send a run's numbers elsewhere; every event is ignored unless overridden."""

    name: str = "sink"
    """What warnings call it, and the format's name in SB3's `logger.record(..., exclude=name)`."""

    def open(self, run: RunDescription) -> None:
        """Called once, before any other event."""

    def start(self, n_iters: int, completed: int = 0) -> None:
        """Training begins: `n_iters` iterations in all, `completed` of them by an earlier, resumed run."""

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        """What iteration number `iteration` (from 1) measured, after `timesteps` tokens in all."""

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        """Corpus scores of a split, by metric key; NaN or the text `n/a` where there is none."""

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        """The split's texts: `sample_id`, `prompt_text`, `generated_text`, `ref_text` and one score per metric key."""

    def ended_early(self, error: BaseException) -> None:
        """The run ends by an error, or by Ctrl-C; `close` follows."""

    def close(self) -> None:
        """The run is over, finished or not."""
