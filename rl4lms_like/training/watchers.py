"""Callbacks that observe a run during training, without an effect on its results.

    saw_iteration     after an update, before its metrics are written; rollout and policy are still available
    saw_evaluation    after an evaluation

The state of a watcher is part of every checkpoint, so a resumed run records the same as an uninterrupted one.
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.evaluation import Evaluation


class Watcher:
    """Base class of watchers; its methods do nothing."""

    def saw_iteration(self, iteration: int) -> None:
        """Called after update number `iteration`, from 1. Values added to the logger are written with its metrics."""

    def saw_evaluation(self, epoch: int, split: str, evaluation: Evaluation) -> None:
        """Called after a split was evaluated, after `epoch` iterations."""

    def state_dict(self) -> dict[str, Any]:
        """Return the watcher's state, in types that JSON supports."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


def watchers_of(run: Run, tracker: Tracker) -> dict[str, Watcher]:
    """Return the watchers of a run, by the names of their states in checkpoints."""
    from rl4lms_like.training.best_model import BestModel  # these modules import Watcher from here
    from rl4lms_like.training.doctor.watcher import Doctor
    from rl4lms_like.training.token_credit import TokenCredit

    return {
        "best_model": BestModel(run, tracker),
        "doctor": Doctor(run, tracker),
        "token_credit": TokenCredit(run, tracker),
    }
