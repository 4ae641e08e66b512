"""Adapters that make rewards from scores: of texts (`scoring.score`), or of the last observation of an episode."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.score import Score, Texts, require_references


class ScoreReward(TextReward, Score):
    """Reward that is the score of each finished response; a sample without the references it needs is an error."""

    kind = "reward"

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> Sequence[float]:
        if self.needs_references:
            require_references(prompt_texts, ref_texts)
        return self.per_text(Texts(prompt_texts, gen_texts, ref_texts, meta_infos))


class LastTokenReward(RewardFunction):
    """Reward of the last token of an episode; 0 for all others."""

    terminal = True

    @abstractmethod
    def score(self, observation: Observation) -> float:
        """Return the reward of an episode, given its last observation."""

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the score at the last token, 0 before."""
        return self.score(current_observation) if done else 0.0
