"""Metrics of repetition: n-grams, frequent sentences, equal texts, lengths."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.diversity import distinct_n, top_sentence_share, unique_share
from rl4lms_like.scoring.ngram_statistics import diversity
from rl4lms_like.scoring.nltk_data import require_sentences


class DiversityMetrics(BaseMetric):
    """GEM-metrics' word statistics: type-token ratios, lengths, distinct n-grams, entropies.

    Args:
        window_size: window of the mean segmental type-token ratio `msttr-<window_size>`, in tokens.
    """

    def __init__(self, window_size: Count = 100) -> None:
        require_sentences("the metric 'diversity'")
        self.window_size = window_size

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `diversity_metrics/` + GEM-metrics' names."""
        statistics = diversity(generated_texts, self.window_size)
        return {f"diversity_metrics/{name}": (None, value) for name, value in statistics.items()}


class DistinctN(BaseMetric):
    """Distinct 1-grams and 2-grams, the most frequent sentence, unique texts.

    All four depend on the number and length of the texts, so compare splits of equal size. A text that is too short for
    a 2-gram counts as one, so that collapsed texts score low however short they are.
    """

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `diversity_metrics/` + `distinct-1`, `distinct-2`, `top_sentence_share`, `unique_texts`, 0 to 1."""
        return {
            "diversity_metrics/distinct-1": (None, distinct_n(generated_texts, 1)),
            "diversity_metrics/distinct-2": (None, distinct_n(generated_texts, 2)),
            "diversity_metrics/top_sentence_share": (None, top_sentence_share(generated_texts)),
            "diversity_metrics/unique_texts": (None, unique_share(generated_texts)),
        }


class Length(BaseMetric):
    """Mean number of words per response."""

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `length/words`: whitespace-separated words of each response, and their mean."""
        words = [float(len(text.split())) for text in generated_texts]
        return {"length/words": (words, fmean(words))}
