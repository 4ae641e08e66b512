"""Metrics from models that compare a text with its references: BERTScore and BLEURT."""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count, Whole
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.bert_score import BERTScoreModel
from rl4lms_like.scoring.bleurt import bleurt_classifier, bleurt_scores
from rl4lms_like.scoring.references import mean, spread, with_references


class BERTScoreMetric(BaseMetric):
    """BERTScore F1 (Zhang et al., 2020) against the best reference; 0 for an empty text.

    Args:
        language: selects the model if `model_type` is not set: `en` roberta-large, `zh` bert-base-chinese, `tr` a
            Turkish BERT, `en-sci` SciBERT, others bert-base-multilingual-cased.
        model_type: hub id or local folder of another model.
        num_layers: layer whose embeddings are compared; required for models that are not listed in `bert-score`.
        batch_size: texts per forward pass.
        device: device of the model; `auto` uses a GPU if available.
        dtype: data type of its weights.
        idf: weight tokens by their inverse document frequency in the references of the split.
        rescale_with_baseline: rescale linearly by the mean score of unrelated texts; `bert-score` ships these baselines
            for some models.
    """

    needs_references = True

    def __init__(
        self,
        language: str = "en",
        model_type: str | None = None,
        num_layers: Whole | None = None,
        batch_size: Count = 64,
        device: Device = "auto",
        dtype: Dtype = "float32",
        idf: bool = False,
        rescale_with_baseline: bool = False,
    ) -> None:
        self.model = BERTScoreModel(
            language,
            model_type,
            num_layers,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            idf=idf,
            rescale_with_baseline=rescale_with_baseline,
            needed_by="the metric 'bert_score'",
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
        """Compute `semantic/bert_score`: F1 of each text, and the mean; NaN for a text without references."""
        there = with_references(reference_texts)
        scores = self.model.f1([generated_texts[i] for i in there], [reference_texts[i] for i in there])
        return {"semantic/bert_score": (spread(scores, there, len(generated_texts)), mean(scores))}


class BLEURTMetric(BaseMetric):
    """BLEURT (Sellam et al., 2020) against the best reference, roughly from -1 to 1.

    Args:
        config_name: `bleurt-base-128` (the default), another published checkpoint with BERT's architecture
            (`bleurt-tiny-128` to `bleurt-large-512`), or the hub id or local folder of a BERT with one logit.
        batch_size: pairs per forward pass.
        device: device of the model; `auto` uses a GPU if available.
        dtype: data type of its weights.
        max_length: maximum tokens per pair; default: the length used to train the published checkpoint. Local copies
            do not store it: set 128 for a copy of `bleurt-base-128`.
    """

    needs_references = True

    def __init__(
        self,
        config_name: str | None = None,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
        max_length: Count | None = None,
    ) -> None:
        self.classifier = bleurt_classifier(
            config_name, batch_size=batch_size, device=device, dtype=dtype, max_length=max_length
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
        """Compute `semantic/bleurt`: the score of each text, and the mean; NaN for a text without references."""
        there = with_references(reference_texts)
        scores = bleurt_scores(
            self.classifier, [generated_texts[i] for i in there], [reference_texts[i] for i in there]
        )
        return {"semantic/bleurt": (spread(scores, there, len(generated_texts)), mean(scores))}
