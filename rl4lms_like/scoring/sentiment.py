"""Sentiment by the VADER lexicon (Hutto and Gilbert, 2014): words with valences, rules for negation and emphasis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rl4lms_like.scoring.score import Score, Texts

POSITIVE = 0.05  # minimum compound score of a positive text, according to VADER's authors


def sentiment(text: str) -> float:
    """Return VADER's compound score, from -1 (negative) to 1 (positive); 0 for a text without words of the lexicon."""
    return float(_analyzer().polarity_scores(text)["compound"])


@dataclass(eq=False)
class Sentiment(Score):
    """VADER's compound score, from -1 (negative) to 1 (positive).

    Args:
        include_prompt: score prompt and response together; False: score the response alone.
    """

    include_prompt: bool = True

    def per_text(self, texts: Texts) -> list[float]:
        return list(map(sentiment, texts.to_read(with_prompts=self.include_prompt)))


@cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
