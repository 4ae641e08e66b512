"""Toy rewards for tests and first runs: cheap and exact."""

from __future__ import annotations

from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.text import LastTokenReward
from rl4lms_like.scoring.synthetic import has_date, increasing_numbers


class RewardIncreasingNumbers(LastTokenReward):
    """Fraction of the finished response that is increasing numbers, from 0 to 1.

    Args:
        min_tokens: responses with fewer than `min_tokens / 2` words are scored as if they had that many.
    """

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens

    def score(self, observation: Observation) -> float:
        return increasing_numbers(observation.context_text, self.min_tokens)


class RewardSentencesWithDates(LastTokenReward):
    """1 if the finished response contains a date such as `2022-10-04`, else 0."""

    def score(self, observation: Observation) -> float:
        return has_date(observation.context_text)
