"""Base class of metrics that compare with references: texts without references are NaN and excluded."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.references import spread, with_references


class ReferenceMetric(BaseMetric):
    """Metric that compares texts with their references; subclasses define `keys` and `compare`."""

    needs_references = True

    keys: tuple[str, ...]
    """Keys of the results, which are also reported if no text has references."""

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        indices, n_texts = with_references(reference_texts), len(generated_texts)
        if not indices:
            return {key: ([math.nan] * n_texts, math.nan) for key in self.keys}
        results = self.compare(
            [generated_texts[index] for index in indices], [reference_texts[index] for index in indices]
        )
        return {
            key: (None if scores is None else spread(scores, indices, n_texts), overall)
            for key, (scores, overall) in results.items()
        }

    @abstractmethod
    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        """Compute the results for at least one text, each with at least one reference."""
