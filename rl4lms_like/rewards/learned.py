"""Rewards from a sequence classifier: the probability of a label, or the output of a reward model."""

from __future__ import annotations

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.classifier import LabelProbability, RewardModelScore


class LearnedBatchedRewardFunction(LabelProbability, ScoreReward):
    """Probability of one label under a classifier, with prompt and response concatenated to one text."""


class RewardModel(RewardModelScore, ScoreReward):
    """Output of a reward model for a response: the logit of a sequence classifier, or a label's probability."""
