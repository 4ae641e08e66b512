"""Rewards from models that compare a response with its references: BERTScore and BLEURT."""

from __future__ import annotations

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.bert_score import BERTScore
from rl4lms_like.scoring.bleurt import Bleurt


class BERTScoreRewardFunction(BERTScore, ScoreReward):
    """BERTScore F1 (Zhang et al., 2020) against the best reference; 0 for an empty response."""


class BLEURTRewardFunction(Bleurt, ScoreReward):
    """BLEURT (Sellam et al., 2020) against the best reference, roughly from -1 to 1."""
