"""Sentiment of the finished text by a lexicon: no model, no network."""

from __future__ import annotations

from typing import Any

from rl4lms_like.rewards.base import BatchedRewardFunction
from rl4lms_like.scoring.sentiment import sentiments


class SentimentReward(BatchedRewardFunction):
    """VADER's compound score of the finished text, from -1 (negative) to 1 (positive).

    Args:
        include_prompt: score prompt and response together; False: the response alone.
    """

    terminal = True

    def __init__(self, include_prompt: bool = True) -> None:
        self.include_prompt = include_prompt

    def __call__(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        dones: list[bool],
        meta_infos: list[dict[str, Any] | None] | None = None,
    ) -> list[float]:
        """The scores of finished responses, 0 for the others."""
        scores = sentiments(prompt_texts, gen_texts, include_prompt=self.include_prompt)
        return [score if done else 0.0 for score, done in zip(scores, dones, strict=True)]
