"""What a user subclasses to report how good the texts are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

MetricResults: TypeAlias = "dict[str, tuple[list[float] | None, float]]"


class BaseMetric(ABC):
    """Scores the generations of one split.

    Attributes:
        needs_references: there is no score without references; a run that evaluates only samples without any is then
            refused before a model is loaded.
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
        """Scores `n` generations; the lists have length `n`.

        Args:
            prompt_texts: the raw prompts.
            generated_texts: what the model wrote after each.
            reference_texts: each sample's references; may be empty lists.
            meta_infos: each sample's `meta_data`.
            model: the language model that is evaluated (a transformers model), for metrics of the model itself.
            split_name: `train`, `val` or `test`.

        Returns:
            Key -> (one score per generation or None, one score for the split). Keys are `family/name`.
        """
