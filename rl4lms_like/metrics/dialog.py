"""Metric for dialogue: the requested intent."""

from __future__ import annotations

from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.intent import IntentMatch


class IntentAccuracyDailyDialog(IntentMatch, ScoreMetric):
    """Fraction of responses with the requested intent, `meta_data["intent"][0]`."""

    keys = ("intent/accuracy",)
