"""History of a run's diagnostics. It is saved in checkpoints, so that a resumed run gives the same alerts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

N_MARKS = 2
"""Number of consecutive evaluations that must agree."""

Diagnostics = dict[str, float | None]
"""Diagnostics of one iteration, and its number as `iteration`."""


@dataclass(frozen=True)
class HeldOutScore:
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
class Evaluations:
    """Best and last evaluations of a held-out metric."""

    best: HeldOutScore
    last: list[HeldOutScore]

    def add(self, held_out_score: HeldOutScore, mode: str) -> None:
        """Add an evaluation."""
        sign = 1 if mode == "max" else -1
        if sign * held_out_score.score > sign * self.best.score:
            self.best = held_out_score
        self.last = [*self.last, held_out_score][-N_MARKS:]


@dataclass
class History:
    """Diagnostics of a run that alerts use.

    Args:
        first: first known value of each diagnostic.
        recent: diagnostics of the last consecutive iterations.
        held_out: best evaluation and last evaluations of each held-out metric.
        best_reward: largest reward of any episode so far.
    """

    first: Diagnostics = field(default_factory=dict)
    recent: list[Diagnostics] = field(default_factory=list)
    held_out: dict[str, Evaluations] = field(default_factory=dict)
    best_reward: float | None = None

    def add(self, diagnostics: Diagnostics, keep: int) -> None:
        """Add the diagnostics of an iteration; `keep` is the number of iterations in the history."""
        if self.recent and self.recent[-1]["iteration"] != (diagnostics["iteration"] or 0) - 1:
            self.recent = []
        self.recent = [*self.recent, diagnostics][-keep:]
        for name, value in diagnostics.items():
            if value is not None:
                self.first.setdefault(name, value)
        best = diagnostics.get("best_reward")
        if best is not None:
            self.best_reward = best if self.best_reward is None else max(best, self.best_reward)

    def add_evaluation(self, epoch: int, key: str, mode: str, score: float, scores_of_texts: Iterable[Any]) -> None:
        """Add a held-out metric, with the mean reward of the iterations since its previous evaluation."""
        evaluations = self.held_out.get(key)
        since = evaluations.last[-1].epoch if evaluations else 0
        recent = [each for each in self.recent if (each["iteration"] or 0) > since]
        rewards = [reward for each in recent if (reward := each.get("reward")) is not None]
        variance = math.fsum((each.get("reward_std") or 0.0) ** 2 / (each.get("n_episodes") or 1.0) for each in recent)
        paid = (fmean(rewards), math.sqrt(variance) / len(rewards)) if rewards else (None, 0.0)
        held_out_score = HeldOutScore(epoch, score, standard_error(scores_of_texts), *paid)
        if evaluations is None:
            self.held_out[key] = Evaluations(held_out_score, [held_out_score])
        else:
            evaluations.add(held_out_score, mode)

    def last(self, name: str, n: int) -> list[float]:
        """Return a diagnostic of the last `n` iterations; empty if one of them lacks it."""
        values = self.known(name, n)
        return values if len(values) == n else []

    def known(self, name: str, n: int) -> list[float]:
        """Return the known values of a diagnostic in the last `n` iterations; empty if there are fewer iterations."""
        values = [each.get(name) for each in self.recent[-n:]]
        return [value for value in values if value is not None] if len(values) == n else []

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Create a history from its fields as `dataclasses.asdict` returns them."""
        evaluations = {
            key: Evaluations(
                HeldOutScore(**evaluations["best"]),
                [HeldOutScore(**held_out_score) for held_out_score in evaluations["last"]],
            )
            for key, evaluations in state["held_out"].items()
        }
        return cls(dict(state["first"]), list(state["recent"]), evaluations, state["best_reward"])


def standard_error(values: Iterable[Any]) -> float:
    """Return the standard error of the mean of a metric's scores of single texts; 0 for fewer than two scores."""
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else 0.0
