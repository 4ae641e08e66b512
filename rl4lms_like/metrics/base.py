"""Base class of metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

MetricResults: TypeAlias = "dict[str, tuple[list[float] | None, float]]"


class BaseMetric(ABC):
    """Metric of the generations of one split.

    Attributes:
        needs_references: True if there is no score without references. A run that evaluates only samples without
            references is then rejected before a model is loaded.
    """

    needs_references: bool = False

    @abstractmethod
    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Score `n` generations; the lists have length `n`.

        Args:
            prompt_texts: the raw prompts.
            generated_texts: the response to each prompt.
            reference_texts: references of each sample; the lists may be empty.
            meta_infos: `meta_data` of each sample.
            model: the language model that is evaluated (a transformers model), for metrics of the model itself.
            split_name: `train`, `val` or `test`.

        Returns:
            Key -> (one score per generation or None, one score for the split). Keys are `family/name`.
        """
