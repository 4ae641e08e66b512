"""Base class of callbacks that observe a run without changing it."""

from __future__ import annotations

from typing import Any

from rl4lms_like.training.evaluation import Evaluation


class Callback:
    """Callback of the training loop; its state is part of every checkpoint, so a resumed run records the same."""

    def on_iteration_end(self, iteration: int) -> None:
        """Called after update number `iteration`, from 1. Values added to the logger are written with its metrics."""

    def on_evaluation_end(self, epoch: int, split: str, evaluation: Evaluation) -> None:
        """Called after a split was evaluated, after `epoch` iterations."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in types that JSON supports."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
