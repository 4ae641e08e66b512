"""Metrics from sequence classifiers and language models as judges, as the rewards with the same ids."""

from __future__ import annotations

from rl4lms_like.core.devices import Device, Dtype
from rl4lms_like.core.numbers import Count, Whole
from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.classifier import LabelProbability, RewardModelScore
from rl4lms_like.scoring.judge import LLMJudge


class LearnedRewardMetric(LabelProbability, ScoreMetric):
    """Probability of one label under a classifier, with prompt and response concatenated to one text."""

    keys = ("semantic/learned_automodel_metric",)

    def __init__(  # the order of arguments is RL4LMs', which differs from that of the reward
        self,
        model_name: str,
        label_ix: Whole,
        batch_size: Count = 32,
        include_prompt_for_eval: bool = True,
        device: Device = "auto",
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(model_name, label_ix, include_prompt_for_eval, batch_size, device, dtype, trust_remote_code)


class RewardModelMetric(RewardModelScore, ScoreMetric):
    """Output of a reward model for the responses: the logit of a sequence classifier, or a label's probability."""

    keys = ("semantic/reward_model",)


class LLMJudgeMetric(LLMJudge, ScoreMetric):
    """Score of the responses by a language model on an OpenAI-compatible server, or how often they win comparisons."""

    keys = ("semantic/llm_judge",)
