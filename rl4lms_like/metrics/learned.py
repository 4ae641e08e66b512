"""Metrics from trained models and from language models as judges, as the rewards with the same ids."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.bert_score import BERTScore
from rl4lms_like.scoring.classifier import Bleurt, IntentMatch, LabelProbability, RewardModelScore
from rl4lms_like.scoring.judge import LLMJudge
from rl4lms_like.system.numbers import Count, Whole


class LearnedRewardMetric(LabelProbability, ScoreMetric):
    """Probability of one label under a classifier, with prompt and response concatenated to one text."""

    keys = ("semantic/learned_automodel_metric",)

    def __init__(
        self,
        model_name: str,
        label_ix: Whole,
        batch_size: Count = 32,
        include_prompt_for_eval: bool = True,
        device: Device = "auto",
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        # A constructor only for the order of the arguments, which is RL4LMs' and differs from that of the reward.
        super().__init__(
            model_name=model_name,
            label_ix=label_ix,
            include_prompt_for_eval=include_prompt_for_eval,
            trust_remote_code=trust_remote_code,
            batch_size=batch_size,
            device=device,
            dtype=dtype,
        )


class RewardModelMetric(RewardModelScore, ScoreMetric):
    """Output of a reward model for the responses: the logit of a sequence classifier, or a label's probability."""

    keys = ("semantic/reward_model",)


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
        max_length: Count | None = None,
        *,
        batch_size: Count = 32,
        device: Device = "auto",
        dtype: Dtype = "float32",
    ) -> None:
        self.config_name = config_name
        super().__init__(config_name, max_length, batch_size=batch_size, device=device, dtype=dtype)


class IntentAccuracyDailyDialog(IntentMatch, ScoreMetric):
    """Fraction of responses with the requested intent, `meta_data["intent"][0]`."""

    keys = ("intent/accuracy",)


class LLMJudgeMetric(LLMJudge, ScoreMetric):
    """Score of the responses by a language model, on a server or this machine, or how often they win comparisons."""

    keys = ("semantic/llm_judge",)
