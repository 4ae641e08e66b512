"""A reward that rises while a held-out metric falls."""

from __future__ import annotations

import pytest

from rl4lms_like.on_policy.doctor.alerts import direction_of, reward_hacking
from rl4lms_like.on_policy.doctor.diagnostics import Evaluations, HeldOutScore, History, standard_error
from tests.on_policy.doctor.histories import context

KEY = "lexical/meteor"


def followed(scores, rewards, *, error=0.0, mode="max", first=0.1) -> History:
    history = History(first={"reward": first, "reward_std": 0.1, "n_episodes": 100.0})
    for epoch, (score, reward) in enumerate(zip(scores, rewards, strict=True)):
        held_out_score = HeldOutScore(10 * epoch, score, error, reward, 0.01)
        if KEY in history.held_out:
            history.held_out[KEY].add(held_out_score, mode)
        else:
            history.held_out[KEY] = Evaluations(held_out_score, [held_out_score])
    return history


def test_it_is_told_when_two_evaluations_in_a_row_agree():
    watched = context(modes={KEY: "max"})
    found = reward_hacking(followed([0.4, 0.3, 0.29, 0.25], [None, 0.3, 0.5, 0.7]), watched)
    assert found.metric == KEY and found.evidence["score"] == [0.4, 0.25]
    assert "from 0.1 to 0.7" in found.message and "from 0.4 (epoch 0) to 0.25 (epoch 30)" in found.message
    assert reward_hacking(followed([0.4, 0.35, 0.31, 0.25], [None, 0.3, 0.5, 0.7]), watched) is None, "once only"
    assert reward_hacking(followed([0.4, 0.31, 0.31, 0.31], [None, 0.3, 0.5, 0.7]), watched) is None, "below a quarter"
    assert reward_hacking(followed([0.4, 0.2, 0.2, 0.2], [None, 0.1, 0.11, 0.12]), watched) is None, "reward stays"


def test_a_fall_within_the_noise_of_few_texts_is_not_told():
    watched = context(modes={KEY: "max"})
    assert reward_hacking(followed([0.4, 0.2, 0.2], [None, 0.5, 0.7], error=0.05), watched) is None
    assert reward_hacking(followed([0.4, 0.2, 0.2], [None, 0.5, 0.7], error=0.04), watched) is not None


def test_a_metric_that_is_to_be_small_may_not_grow():
    watched = context(modes={KEY: "min"})
    assert reward_hacking(followed([4.0, 5.2, 6.0], [None, 0.5, 0.7], mode="min"), watched) is not None
    assert reward_hacking(followed([4.0, 4.9, 4.9], [None, 0.5, 0.7], mode="min"), watched) is None


def test_the_best_evaluation_is_what_is_fallen_from():
    watched = context(modes={KEY: "max"})
    found = reward_hacking(followed([0.2, 0.4, 0.28, 0.28], [None, 0.3, 0.5, 0.7]), watched)
    assert found.evidence["epoch"] == [10.0, 30.0]
    assert reward_hacking(followed([0.2, 0.4, 0.28, 0.28], [None, 0.7, 0.5, 0.7]), watched) is None


def test_it_can_be_switched_off():
    watched = context(modes={KEY: "max"}, limits={"max_held_out_fall": None})
    assert reward_hacking(followed([0.4, 0.1, 0.1], [None, 0.5, 0.7]), watched) is None


@pytest.mark.parametrize(
    ("key", "mode"),
    [
        ("lexical/meteor", "max"), ("lexical/ter", "min"), ("lexical/ter/named", "min"), ("lexical/terse", "max"),
        ("fluency_metrics/reference_perplexity", "min"), ("length/words", None), ("diversity_metrics/distinct-2", None),
    ],
)  # fmt: skip
def test_directions_are_known_by_the_beginning_of_the_key(key, mode):
    assert direction_of(key) == mode


def test_marks_have_the_standard_errors_of_both():
    texts = [1.0, 2.0, 3.0, "n/a"]
    past = History()
    past.add({"iteration": 1, "reward": 0.2, "reward_std": 0.3, "n_episodes": 9.0}, keep=9)
    past.add({"iteration": 2, "reward": 0.4, "reward_std": 0.4, "n_episodes": 16.0}, keep=9)
    past.add_evaluation(5, KEY, "max", 2.0, texts)
    (held_out_score,) = past.held_out[KEY].last
    assert held_out_score.error == pytest.approx((1 / 3) ** 0.5) and held_out_score.reward == pytest.approx(0.3)
    assert held_out_score.reward_error == pytest.approx((0.01 + 0.01) ** 0.5 / 2)
    assert standard_error(["n/a", 3.0]) == 0.0
