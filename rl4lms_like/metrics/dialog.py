"""Metric for dialogue: the requested intent."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.classifier import classifier
from rl4lms_like.scoring.intent import DEFAULT_CLASSIFIER, intent_matches


class IntentAccuracyDailyDialog(BaseMetric):
    """Fraction of responses with the requested intent, `meta_data["intent"][0]`.

    Args:
        model_name: hub id or local folder of the intent classifier; its label 0 is intent 1.
        batch_size: texts per forward pass.
        device: device of the classifier; `auto` uses a GPU if available.
        dtype: data type of its weights.
    """

    def __init__(
        self,
        model_name: str = DEFAULT_CLASSIFIER,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        self.classifier = classifier(
            model_name, role="classifier of intents", batch_size=batch_size, device=device, dtype=dtype
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
        """Compute `intent/accuracy`: 1 or 0 for each text, and the fraction of 1."""
        metas = meta_infos if meta_infos is not None else [None] * len(generated_texts)
        matches = intent_matches(self.classifier, prompt_texts, generated_texts, metas)
        return {"intent/accuracy": (matches, fmean(matches))}
