"""What the doctor remembers of a run: few numbers, in JSON's types, so that a run that goes on sees what it saw.

first        each sign as it was when first seen
best_reward  the largest of any episode
recent       the signs of the last iterations, none left out between them
held_out     of each metric that is watched: its best evaluation and the last ones
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl4lms_like.training.doctor.signs import Signs

N_MARKS = 2
"""Evaluations in a row that must say the same."""


@dataclass(frozen=True)
class Mark:
    """A metric and the training reward at one evaluation.

    Args:
        epoch: iterations before it.
        score: the metric's.
        error: standard error of the score; 0 where it has no score of single texts.
        reward: mean of an episode over the rollouts since the evaluation before, as far as they are remembered; None
            before the first.
        reward_error: its standard error.
    """

    epoch: int
    score: float
    error: float
    reward: float | None
    reward_error: float


@dataclass
class Trail:
    """A metric over the evaluations."""

    best: Mark
    last: list[Mark]

    def add(self, mark: Mark, mode: str) -> None:
        """One more evaluation."""
        sign = 1 if mode == "max" else -1
        if sign * mark.score > sign * self.best.score:
            self.best = mark
        self.last = [*self.last, mark][-N_MARKS:]


@dataclass
class History:
    """The numbers of a run, as far as alarms look back."""

    first: Signs = field(default_factory=dict)
    recent: list[Signs] = field(default_factory=list)
    held_out: dict[str, Trail] = field(default_factory=dict)
    best_reward: float | None = None

    def add(self, signs: Signs, keep: int) -> None:
        """One more iteration; `keep` is how many are looked back at."""
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
        """A sign in the last `n` iterations; nothing if one of them does not have it."""
        values = [signs.get(name) for signs in self.recent[-n:]]
        present = [value for value in values if value is not None]
        return present if len(present) == n else []

    def known(self, name: str, n: int) -> list[float]:
        """A sign where it is known among the last `n` iterations, of which there must be as many."""
        values = [signs.get(name) for signs in self.recent[-n:]]
        return [value for value in values if value is not None] if len(values) == n else []

    def state_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        trails = {
            key: {"best": vars(trail.best), "last": [vars(mark) for mark in trail.last]}
            for key, trail in self.held_out.items()
        }
        recent = [dict(signs) for signs in self.recent]
        return {"first": dict(self.first), "recent": recent, "held_out": trails, "best_reward": self.best_reward}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """What `state_dict` gave."""
        trails = {
            key: Trail(Mark(**trail["best"]), [Mark(**mark) for mark in trail["last"]])
            for key, trail in state["held_out"].items()
        }
        return cls(dict(state["first"]), [dict(signs) for signs in state["recent"]], trails, state["best_reward"])
