"""The rewards of the table pay what their scores say, at the end of the episode."""

from __future__ import annotations

import numpy as np
import pytest

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards.call import score_episodes
from rl4lms_like.rewards.sentiment import SentimentReward
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers, RewardSentencesWithDates
from rl4lms_like.scoring.sentiment import sentiment


@pytest.fixture
def played(tiny_tokenizer):
    layout = TextLayout(tiny_tokenizer, 16, 64)

    def play(reward, prompt, response):
        ids = np.array(tiny_tokenizer(response)["input_ids"])
        rewards = score_episodes(reward, [Observation(Sample("s", prompt), np.array([5]), ids, len(ids), layout)])
        assert (rewards[:-1] == 0).all()
        return rewards[-1]

    return play


def test_increasing_numbers(played):
    assert played(RewardIncreasingNumbers(2), "9 9", " 1 2 3 one") == pytest.approx(3 / 4)
    assert played(RewardIncreasingNumbers(20), "9 9", " 1 2 3") == pytest.approx(3 / 10)


def test_dates(played):
    assert played(RewardSentencesWithDates(), "on", " 2022-10-04.") == 1
    assert played(RewardSentencesWithDates(), "2022-10-04", " was a day") == 0


def test_sentiment(played):
    text = "What a wonderful", " but dull film."
    assert played(SentimentReward(), *text) == pytest.approx(sentiment("".join(text)))
    assert played(SentimentReward(include_prompt=False), *text) == pytest.approx(sentiment(text[1]))
    assert played(SentimentReward(), "It was", " terrible.") < 0 < played(SentimentReward(), "It was", " great.")
