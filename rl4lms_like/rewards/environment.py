"""Reward of runs whose only rewards are those of their environment."""

from __future__ import annotations

from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.text import LastTokenReward


class EnvironmentReward(LastTokenReward):
    """No reward of its own: the rewards are those that `step` of `env.dialogue` returns."""

    def score(self, observation: Observation) -> float:
        return 0.0
