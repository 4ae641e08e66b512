"""The shop: answers of the customer, and scores."""

from __future__ import annotations

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.games.shop import Shop
from tests.envs.games.conftest import mean_score, played, scripted

HAT = {"sample": Sample("0", "", ["small red hat"])}


def asks_what_is_missing(env: Shop) -> str:
    missing = [slot for slot in ("size", "colour") if slot not in env.said]
    return f"Which {missing[0]}?" if missing else "Here is a {size} {colour} {item}.".format(**env.said)


def test_an_episode():
    env = Shop()
    first = {env.reset(seed=seed, options=HAT)[0] for seed in range(50)}
    assert first == {"I want a hat.\n", "I want a small hat.\n", "I want a red hat.\n", "I want a small red hat.\n"}
    assert env.step("Which COLOUR, and which size?")[:4] == ("red\n", -0.1, False, False)
    assert env.step("color?")[0] == "red\n"
    assert env.step("What size do you need?")[0] == "small\n"
    assert env.step("And what item?")[0] == "hat\n"
    assert env.step("What?")[:2] == ("Pardon?\n", -0.1)
    assert env.step("I have nothing")[:2] == ("Pardon?\n", -0.1)
    assert env.step("a large blue hat.")[:3] == ("Not large and not blue.\n", -0.3, False)
    assert env.step("a small blue hat.")[0] == "Not blue.\n"
    answer, reward, terminated, truncated, info = env.step("A red hat, small!")
    assert (answer, reward, terminated, truncated) == ("Thank you.\n", 1.0, True, False)
    assert info == {"metrics": {"sold": 1.0, "questions": 5.0, "wrong_offers": 2.0}}


def test_a_question_is_no_offer_and_a_list_of_all_is_none_either():
    env = Shop()
    env.reset(seed=0, options=HAT)
    assert env.step("Do you want a small red hat?")[:3] == ("Pardon?\n", -0.1, False)
    assert env.step("small medium large red blue green black hat coat shirt")[:3] == ("Pardon?\n", -0.1, False)


def test_the_customer_leaves_after_the_last_wrong_offer():
    env = Shop(patience=2)
    env.reset(seed=0, options=HAT)
    assert env.step("large red hat")[2] is False
    assert env.step("large red hat")[:4] == ("Goodbye.\n", -0.3, True, False)


def test_the_best_player_asks_for_what_is_missing():
    assert mean_score(Shop(), asks_what_is_missing, 4000) == pytest.approx(0.9, abs=0.005)
    by_turns = {}
    for seed in range(200):
        episode = played(Shop(), asks_what_is_missing, seed)
        by_turns.setdefault(len(episode["rewards"]), set()).add(round(sum(episode["rewards"]), 6))
    assert by_turns == {1: {1.0}, 2: {0.9}, 3: {0.8}}


def test_the_score_of_the_scripted_player():
    assert mean_score(Shop(), scripted, 4000) == pytest.approx(0.75, abs=0.015)


def test_a_reference_that_names_nothing_to_sell_is_an_error():
    with pytest.raises(ValueError, match="does not name"):
        Shop().reset(seed=0, options={"sample": Sample("0", "", ["a hat"])})
