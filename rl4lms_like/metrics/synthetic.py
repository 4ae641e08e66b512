"""Toy metrics, as the toy rewards, under RL4LMs' names and keys."""

from __future__ import annotations

from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.score import Texts
from rl4lms_like.scoring.synthetic import has_date, increasing_numbers


class IncreasingNumbersinText(ScoreMetric):
    """Fraction of each response that is increasing numbers, from 0 to 1.

    Args:
        min_tokens: responses with fewer than `min_tokens / 2` words are scored as if they had that many.
    """

    keys = ("synthetic/increasing_numbers_in_text",)

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens

    def per_text(self, texts: Texts) -> list[float]:
        return [increasing_numbers(text, self.min_tokens) for text in texts.responses]


class DateInText(ScoreMetric):
    """Fraction of responses that contain a date such as `2022-10-04`."""

    keys = ("synthetic/dates_in_text",)

    def per_text(self, texts: Texts) -> list[float]:
        return list(map(has_date, texts.responses))
