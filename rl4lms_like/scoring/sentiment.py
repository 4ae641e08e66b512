"""Sentiment by the VADER lexicon (Hutto and Gilbert, 2014): words with valences, rules for negation and emphasis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

POSITIVE = 0.05
"""Minimum compound score of a positive text, according to VADER's authors."""


def sentiment(text: str) -> float:
    """Return VADER's compound score, from -1 (negative) to 1 (positive); 0 for a text without words of the lexicon."""
    return float(_analyzer().polarity_scores(text)["compound"])


def sentiments(prompt_texts: Sequence[str], generated_texts: Sequence[str], *, include_prompt: bool) -> list[float]:
    """Return the score of each response, together with its prompt or alone."""
    prompts = prompt_texts if include_prompt else [""] * len(generated_texts)
    return [sentiment(prompt + generated) for prompt, generated in zip(prompts, generated_texts, strict=True)]


@cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
