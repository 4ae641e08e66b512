"""Rewards from models that compare a response with its references: BERTScore and BLEURT."""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count, Whole
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.bert_score import BERTScoreModel
from rl4lms_like.scoring.bleurt import bleurt_classifier, bleurt_scores
from rl4lms_like.scoring.references import require_references


class BERTScoreRewardFunction(TextReward):
    """BERTScore F1 (Zhang et al., 2020) against the best reference; 0 for an empty response.

    Args:
        language: selects the model if `model_type` is not set: `en` roberta-large, `zh` bert-base-chinese, `tr` a
            Turkish BERT, `en-sci` SciBERT, others bert-base-multilingual-cased.
        model_type: hub id or local folder of another model.
        num_layers: layer whose embeddings are compared; required for models that are not listed in `bert-score`.
        batch_size: texts per forward pass.
        device: device of the model; `auto` uses a GPU if available.
        dtype: data type of its weights.
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
        rescale_with_baseline: bool = False,
    ) -> None:
        self.model = BERTScoreModel(
            language,
            model_type,
            num_layers,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
            rescale_with_baseline=rescale_with_baseline,
            needed_by="the reward 'bert_score'",
        )

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        require_references(prompt_texts, ref_texts)
        return self.model.f1(gen_texts, ref_texts)


class BLEURTRewardFunction(TextReward):
    """BLEURT (Sellam et al., 2020) against the best reference, roughly from -1 to 1.

    Args:
        checkpoint: `bleurt-base-128` (the default), another published checkpoint with BERT's architecture
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
        checkpoint: str | None = None,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
        max_length: Count | None = None,
    ) -> None:
        self.classifier = bleurt_classifier(
            checkpoint, batch_size=batch_size, device=device, dtype=dtype, max_length=max_length
        )

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        require_references(prompt_texts, ref_texts)
        return bleurt_scores(self.classifier, gen_texts, ref_texts)
