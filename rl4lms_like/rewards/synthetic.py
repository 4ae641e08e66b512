"""Toy rewards for tests and first runs: cheap and exact."""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.scoring.synthetic import has_date, increasing_numbers


class RewardIncreasingNumbers(RewardFunction):
    """Fraction of the finished response that is increasing numbers, from 0 to 1.

    Args:
        min_tokens: responses with fewer than `min_tokens / 2` words are scored as if they had that many.
    """

    terminal = True

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the score at the last token, 0 before."""
        return increasing_numbers(current_observation.context_text, self.min_tokens) if done else 0.0


class RewardSentencesWithDates(RewardFunction):
    """1 if the finished response contains a date such as `2022-10-04`, else 0."""

    terminal = True

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the score at the last token, 0 before."""
        return has_date(current_observation.context_text) if done else 0.0
