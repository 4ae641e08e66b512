"""Metric of novelty with respect to training texts."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import MissingResourceError
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.novelty import novelty, read_texts


class NoveltyMetric(BaseMetric):
    """Fraction of n-grams, and of whole texts, that do not occur in a file of training texts.

    Args:
        training_texts: the file, one text per line; `.jsonl`: one object per line. It is read at every evaluation.
        field: key of the text, or of a list of texts, in each object.
        max_n: n-grams of 1 to `max_n` tokens are counted.
    """

    def __init__(self, training_texts: str, field: str = "text", max_n: Count = 3) -> None:
        self.path = with_home(training_texts)
        self.field = field
        self.max_n = max_n
        if not self.path.is_file():
            raise MissingResourceError(
                f"the file of training texts {training_texts!r}",
                needed_by="the metric 'novelty'",
                command="set `training_texts` to an existing file with one text per line",
                offline="the same",
            )

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `diversity_metrics/novelty-N` of each text and over all n-grams, and `.../novel_texts`, 0 or 1."""
        found = novelty(generated_texts, read_texts(self.path, self.field), self.max_n)
        results: MetricResults = {
            f"diversity_metrics/novelty-{order}": (scores, found.overall[order])
            for order, scores in found.of_ngrams.items()
        }
        return results | {"diversity_metrics/novel_texts": (found.of_texts, fmean(found.of_texts))}
