"""Base class of sinks. A tracker passes every event to all of its sinks.

If a sink raises, one warning is logged and the run continues. Only errors of the run folder end a run.
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
    """Description of a run for sinks."""

    path: Path  # the run folder
    project: str
    experiment: str  # name of the folder; `sentiment_2` if `sentiment` already contained a run
    config: Mapping[str, Any] = field(default_factory=dict)  # as plain data
    entity: str | None = None  # the account or team in a tracking service


class Sink:
    """Base class to send a run's numbers elsewhere; events are ignored unless overridden.

    class PrintedRewards(Sink):
        def write(self, values, *, iteration, timesteps):
            if "rollout_info/ep_rew" in values:
                print(iteration, values["rollout_info/ep_rew"])
    """

    name: str = "sink"
    """Name in warnings and in SB3's `logger.record(..., exclude=name)`."""

    def open(self, run: RunDescription) -> None:
        """Handle the start of the run; called once, before any other event."""

    def start(self, n_iters: int, completed: int = 0) -> None:
        """Handle the start of training: `n_iters` iterations in all, `completed` of them before a resume."""

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        """Handle the values of an iteration (from 1), `ppo/*`, `time/*` ..., after `timesteps` tokens in all."""

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        """Handle the corpus scores of a split, by metric key; NaN or the text `n/a` if there is no score."""

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        """Handle texts: `sample_id`, `prompt_text`, `generated_text`, `ref_text` and one score per metric key."""

    def log_responses(self, epoch: Epoch, responses: Predictions) -> None:
        """Handle responses of the last rollout: `sample_id`, `prompt_text`, `generated_text` and `reward`.

        Called at each evaluation of an RL run after its first iteration.
        """

    def ended_early(self, error: BaseException) -> None:
        """Handle the end of the run by an error or Ctrl-C; `close` is called afterwards."""

    def close(self) -> None:
        """Handle the end of the run, finished or not."""
