"""The sentiment score is VADER's."""

from __future__ import annotations

import pytest
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from rl4lms_like.scoring.sentiment import Sentiment, sentiment
from tests.texts import texts

TEXTS = ("The film was a joy.", "A dull, terrible bore!", "It was not good at all.", "The table is brown.", "")


@pytest.mark.parametrize("text", TEXTS)
def test_equals_the_package(text):
    assert sentiment(text) == SentimentIntensityAnalyzer().polarity_scores(text)["compound"]


def test_knows_good_from_bad():
    joy, bore, negated, plain, empty = map(sentiment, TEXTS)
    assert joy > 0.5 > 0 > negated > bore and bore < -0.5
    assert plain == empty == 0


def test_the_prompt_may_count():
    prompts, responses = ["What a wonderful film,", "It was"], [" with chairs.", " with chairs."]
    both = texts(responses, prompts=prompts)
    together = Sentiment().per_text(both)
    assert together == [sentiment("What a wonderful film, with chairs."), 0.0] and together[0] > 0.5
    assert Sentiment(include_prompt=False).per_text(both) == [0.0, 0.0]


def test_agrees_with_people_on_film_reviews(shared_dir):
    """Every 25th of 10,605 sentences that people rated; rows are id, mean rating, sentence."""
    lines = (shared_dir / "data/vader_icwsm14/movieReviewSnippets_GroundTruth.txt").read_text(encoding="utf-8")
    rated = [line.split("\t") for line in lines.splitlines()[::25]]
    signs = [(float(rating) > 0, sentiment(text)) for _, rating, text in rated]
    agreeing = [liked == (score > 0) for liked, score in signs if score]
    assert len(agreeing) > 300 and sum(agreeing) / len(agreeing) > 0.65
