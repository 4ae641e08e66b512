"""Reward for the sentiment of the finished text, from a lexicon: needs no model and no network."""

from __future__ import annotations

from typing import Any

from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.sentiment import sentiments


class SentimentReward(TextReward):
    """VADER's compound score of the finished text, from -1 (negative) to 1 (positive).

    Args:
        include_prompt: score prompt and response together; False: score the response alone.
    """

    def __init__(self, include_prompt: bool = True) -> None:
        self.include_prompt = include_prompt

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        return sentiments(prompt_texts, gen_texts, include_prompt=self.include_prompt)
