"""Whether the policy writes or recites."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import MissingResourceError
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.novelty import novelty, read_texts


class NoveltyMetric(BaseMetric):
    """Share of n-grams, and of whole texts, that the texts of a file do not have.

    Args:
        training_texts: the file, one text a line; `.jsonl`: one object a line. It is read at every evaluation.
        field: the objects' key of the text, or of a list of texts.
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
                command="name a file that is there, one text a line, in `training_texts`",
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
        """`diversity_metrics/novelty-N` of each text and over all n-grams; `diversity_metrics/novel_texts`, 0 or 1."""
        found = novelty(generated_texts, read_texts(self.path, self.field), self.max_n)
        results: MetricResults = {
            f"diversity_metrics/novelty-{order}": (scores, found.overall[order])
            for order, scores in found.of_ngrams.items()
        }
        return results | {"diversity_metrics/novel_texts": (found.of_texts, fmean(found.of_texts))}
