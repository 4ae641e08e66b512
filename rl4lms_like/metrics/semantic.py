"""Metrics from models that compare a text with its references: BERTScore and BLEURT."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.bert_score import BERTScore
from rl4lms_like.scoring.bleurt import Bleurt


@dataclass(eq=False)
class BERTScoreMetric(BERTScore, ScoreMetric):
    """BERTScore F1 (Zhang et al., 2020) against the best reference; 0 for an empty text.

    Args:
        idf: weight tokens by their inverse document frequency in the references of the split.
    """

    keys = ("semantic/bert_score",)

    idf: bool = False


class BLEURTMetric(Bleurt, ScoreMetric):
    """BLEURT (Sellam et al., 2020) against the best reference, roughly from -1 to 1.

    Args:
        config_name: `bleurt-base-128` (the default), another published checkpoint with BERT's architecture
            (`bleurt-tiny-128` to `bleurt-large-512`), or the hub id or local folder of a BERT with one logit.
    """

    keys = ("semantic/bleurt",)

    config_name: str | None  # RL4LMs' name of `checkpoint`; config types are read from the annotations of the class

    def __init__(
        self,
        config_name: str | None = None,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
        max_length: Count | None = None,
    ) -> None:
        self.config_name = config_name
        super().__init__(config_name, batch_size, device, dtype, max_length)
