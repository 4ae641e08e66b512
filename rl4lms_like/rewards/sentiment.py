"""Reward for the sentiment of the finished text, from a lexicon: needs no model and no network."""

from __future__ import annotations

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.sentiment import Sentiment


class SentimentReward(Sentiment, ScoreReward):
    """VADER's compound score of the finished text, from -1 (negative) to 1 (positive)."""
