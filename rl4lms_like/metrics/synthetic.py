"""Toy metrics, as the toy rewards, under RL4LMs' names and keys."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.synthetic import has_date, increasing_numbers


class IncreasingNumbersinText(BaseMetric):
    """Fraction of each response that is increasing numbers, from 0 to 1.

    Args:
        min_tokens: responses with fewer than `min_tokens / 2` words are scored as if they had that many.
    """

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `synthetic/increasing_numbers_in_text`: the reward's score of each text, and the mean."""
        scores = [increasing_numbers(text, self.min_tokens) for text in generated_texts]
        return {"synthetic/increasing_numbers_in_text": (scores, fmean(scores))}


class DateInText(BaseMetric):
    """Fraction of responses that contain a date such as `2022-10-04`."""

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `synthetic/dates_in_text`: 0 or 1 for each text, and the fraction of 1."""
        scores = [has_date(text) for text in generated_texts]
        return {"synthetic/dates_in_text": (scores, fmean(scores))}
