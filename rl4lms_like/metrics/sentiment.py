"""Metric of sentiment by the VADER lexicon."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.sentiment import POSITIVE, sentiments


class SentimentMetric(BaseMetric):
    """Sentiment of the texts, as in the reward `sentiment`.

    Args:
        include_prompt: score prompt and response together; False: score the response alone.
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
        """Compute `semantic/sentiment`, the compound score, and `.../sentiment_positive`, the fraction from 0.05 on."""
        scores = sentiments(prompt_texts, generated_texts, include_prompt=self.include_prompt)
        positive = [float(score >= POSITIVE) for score in scores]
        return {
            "semantic/sentiment": (scores, fmean(scores)),
            "semantic/sentiment_positive": (positive, fmean(positive)),
        }
