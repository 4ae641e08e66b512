"""Metric of sentiment by the VADER lexicon."""

from __future__ import annotations

from rl4lms_like.metrics.base import MetricResults, TextsMetric
from rl4lms_like.scoring.score import Texts, mean
from rl4lms_like.scoring.sentiment import POSITIVE, Sentiment


class SentimentMetric(Sentiment, TextsMetric):
    """Sentiment of the texts, as in the reward `sentiment`."""

    def results(self, texts: Texts) -> MetricResults:
        """Compute `semantic/sentiment`, the compound score, and `.../sentiment_positive`, the fraction from 0.05 on."""
        scores = self.per_text(texts)
        positive = [float(score >= POSITIVE) for score in scores]
        return {
            "semantic/sentiment": (scores, mean(scores)),
            "semantic/sentiment_positive": (positive, mean(positive)),
        }
