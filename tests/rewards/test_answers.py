"""Rewards that check answers and lengths: what they pay, and what they say where they cannot."""

from __future__ import annotations

import numpy as np
import pytest

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.call import score_episodes, score_transition
from rl4lms_like.rewards.lengths import LengthPenalty, RepetitionPenalty, SoftOverlong
from rl4lms_like.system.errors import RewardError
from rl4lms_like.testing.checkers import check_reward_function

ROWS = [
    ("exact_match", {"ignore_case": True, "reward": 2.0, "penalty": -1.0}),
    ("math_equal", {"penalty": -0.5}),
    ("regex", {"pattern": r"\d", "invert": True}),
    ("length_penalty", {"max_length": 3}),
    ("length_penalty", {"max_length": 3, "unit": "tokens"}),
    ("soft_overlong", {"max_length": 12, "cache": 4}),
    ("repetition_penalty", {"ngram_size": 2}),
]


@pytest.fixture
def finished(tiny_tokenizer):
    """Finished episodes of given responses, each with references."""
    layout = TextLayout(tiny_tokenizer, 32, 64)

    def make(*responses: str, references=("42",)) -> list[Observation]:
        rows = [np.asarray(tiny_tokenizer(text, add_special_tokens=False)["input_ids"]) for text in responses]
        sample = Sample("s", "What is 6 * 7?", list(references))
        return [Observation(sample, layout.encode("What is 6 * 7?"), row, len(row), layout) for row in rows]

    return make


@pytest.mark.parametrize(("id", "args"), ROWS)
def test_they_pass_the_checker(id, args):
    check_reward_function(REWARDS.get(id, args))


@pytest.mark.parametrize(("id", "args"), ROWS)
def test_single_and_batched_forms_agree(finished, id, args):
    reward = REWARDS.get(id, args)
    episodes = finished(" 42", " The answer is 42.", " x x x x x x", " 41 or 42 or 41")
    whole = score_episodes(reward, episodes)
    ends = np.cumsum([episode.n_actions for episode in episodes]) - 1
    single = [score_transition(reward, one.after(one.n_actions - 1), 5, one, True) for one in episodes]
    np.testing.assert_array_equal(whole[ends], np.asarray(single, dtype=np.float32))


def totals(reward, episodes):
    return [score_episodes(reward, [episode]).sum() for episode in episodes]


def test_right_and_wrong_answers_are_paid(finished):
    episodes = finished(" 42", " It is 42.", " no idea")
    assert totals(REWARDS.get("exact_match", {}), episodes) == [1, 0, 0]
    assert totals(REWARDS.get("exact_match", {"extract": r"(\d+)", "penalty": -1.0}), episodes) == [1, 1, -1]
    assert totals(REWARDS.get("math_equal", {"reward": 3.0}), episodes) == [3, 3, 0]
    assert totals(REWARDS.get("regex", {"pattern": "IDEA", "flags": ["ignorecase"], "penalty": -2.0}), episodes) == [
        -2,
        -2,
        1,
    ]


@pytest.mark.parametrize("id", ["exact_match", "math_equal"])
def test_without_references_there_is_no_answer(finished, id):
    with pytest.raises(RewardError, match="'s'"):
        score_episodes(REWARDS.get(id, {}), finished(" 42", references=()))


def test_lengths_are_counted_in_words_letters_or_tokens(finished):
    (episode,) = finished(" one two three")
    prices = {unit: LengthPenalty(2, unit, 0.001, -1.0) for unit in ("words", "characters", "tokens")}
    lengths = {"words": 3, "characters": len(episode.context_text), "tokens": episode.n_actions}
    for unit, reward in prices.items():
        assert totals(reward, [episode]) == [pytest.approx(-0.001 * (lengths[unit] - 2))]
    n = episode.n_actions
    assert totals(SoftOverlong(n, 2), [episode]) == [-1.0] and totals(SoftOverlong(n + 2, 2), [episode]) == [0.0]
    assert totals(RepetitionPenalty(1, -3.0), finished(" x x x")) == [-2.0]


def test_a_cache_that_is_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError):
        SoftOverlong(4, 5)
