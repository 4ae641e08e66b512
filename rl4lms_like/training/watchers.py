"""What looks at a run while it trains, and changes nothing of what it computes.

    saw_iteration     after an update, before its numbers are written; rollout and policy are still there
    saw_evaluation    after an evaluation

What a watcher remembers is part of every checkpoint, so that a run that goes on tells what an uninterrupted one tells.
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.evaluation import Evaluation


class Watcher:
    """Does nothing; what a watcher overrides is all it does."""

    def saw_iteration(self, iteration: int) -> None:
        """An update is done; `iteration` counts from 1. What is recorded in the logger is written with its numbers."""

    def saw_evaluation(self, epoch: int, split: str, evaluation: Evaluation) -> None:
        """A split was evaluated after `epoch` iterations."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, in JSON's types."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""


def watchers_of(run: Run, tracker: Tracker) -> dict[str, Watcher]:
    """The watchers that a run's config asks for, by the names of their states in checkpoints."""
    from rl4lms_like.training.best_model import BestModel  # they are Watchers
    from rl4lms_like.training.doctor.watcher import Doctor
    from rl4lms_like.training.token_credit import TokenCredit

    return {
        "best_model": BestModel(run, tracker),
        "doctor": Doctor(run, tracker),
        "token_credit": TokenCredit(run, tracker),
    }
