"""History of a run's diagnostics. It is saved in checkpoints, so that a resumed run gives the same alerts.

first        first known value of each diagnostic
best_reward  largest reward of any episode so far
recent       diagnostics of the last consecutive iterations
held_out     best evaluation and last evaluations of each held-out metric
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl4lms_like.training.doctor.signs import Signs

N_MARKS = 2
"""Number of consecutive evaluations that must agree."""


@dataclass(frozen=True)
class Mark:
    """Held-out metric and training reward at one evaluation.

    Args:
        epoch: number of iterations before the evaluation.
        score: score of the metric.
        error: standard error of the score; 0 if the metric has no scores of single texts.
        reward: mean episode reward of the rollouts since the previous evaluation that are in the history; None if there
            are none.
        reward_error: standard error of the reward.
    """

    epoch: int
    score: float
    error: float
    reward: float | None
    reward_error: float


@dataclass
class Trail:
    """Best and last evaluations of a held-out metric."""

    best: Mark
    last: list[Mark]

    def add(self, mark: Mark, mode: str) -> None:
        """Add an evaluation."""
        sign = 1 if mode == "max" else -1
        if sign * mark.score > sign * self.best.score:
            self.best = mark
        self.last = [*self.last, mark][-N_MARKS:]


@dataclass
class History:
    """Diagnostics of a run that alerts use."""

    first: Signs = field(default_factory=dict)
    recent: list[Signs] = field(default_factory=list)
    held_out: dict[str, Trail] = field(default_factory=dict)
    best_reward: float | None = None

    def add(self, signs: Signs, keep: int) -> None:
        """Add the diagnostics of an iteration; `keep` is the number of iterations in the history."""
        if self.recent and self.recent[-1]["iteration"] != (signs["iteration"] or 0) - 1:
            self.recent = []
        self.recent = [*self.recent, signs][-keep:]
        for name, value in signs.items():
            if value is not None:
                self.first.setdefault(name, value)
        best = signs.get("best_reward")
        if best is not None:
            self.best_reward = best if self.best_reward is None else max(best, self.best_reward)

    def last(self, name: str, n: int) -> list[float]:
        """Return a diagnostic of the last `n` iterations; empty if one of them lacks it."""
        values = [signs.get(name) for signs in self.recent[-n:]]
        present = [value for value in values if value is not None]
        return present if len(present) == n else []

    def known(self, name: str, n: int) -> list[float]:
        """Return the known values of a diagnostic in the last `n` iterations; empty if there are fewer iterations."""
        values = [signs.get(name) for signs in self.recent[-n:]]
        return [value for value in values if value is not None] if len(values) == n else []

    def state_dict(self) -> dict[str, Any]:
        """Return the history in JSON types."""
        trails = {
            key: {"best": vars(trail.best), "last": [vars(mark) for mark in trail.last]}
            for key, trail in self.held_out.items()
        }
        recent = [dict(signs) for signs in self.recent]
        return {"first": dict(self.first), "recent": recent, "held_out": trails, "best_reward": self.best_reward}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Create a history from the result of `state_dict`."""
        trails = {
            key: Trail(Mark(**trail["best"]), [Mark(**mark) for mark in trail["last"]])
            for key, trail in state["held_out"].items()
        }
        return cls(dict(state["first"]), [dict(signs) for signs in state["recent"]], trails, state["best_reward"])
