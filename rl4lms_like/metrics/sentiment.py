"""Sentiment of texts by the VADER lexicon."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.sentiment import POSITIVE, sentiments


class SentimentMetric(BaseMetric):
    """How positive texts are, as the reward `sentiment` sees them.

    Args:
        include_prompt: score prompt and response together; False: the response alone.
    """

    def __init__(self, include_prompt: bool = True) -> None:
        self.include_prompt = include_prompt

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """`semantic/sentiment`: the mean compound score; `semantic/sentiment_positive`: the share of at least 0.05."""
        scores = sentiments(prompt_texts, generated_texts, include_prompt=self.include_prompt)
        positive = [float(score >= POSITIVE) for score in scores]
        return {
            "semantic/sentiment": (scores, fmean(scores)),
            "semantic/sentiment_positive": (positive, fmean(positive)),
        }
