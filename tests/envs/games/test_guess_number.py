"""The number to guess: answers, scores of the best and of the scripted player, seeds."""

from __future__ import annotations

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.games.guess_number import GuessNumber
from tests.envs.games.conftest import mean_score, played, scripted


def halves(env: GuessNumber) -> str:
    return str((env.lowest + env.highest) // 2)


def with_number(number: int) -> Sample:
    return Sample("0", "", [str(number)])


def test_an_episode():
    env = GuessNumber(high=15)
    assert env.reset(seed=0, options={"sample": with_number(5)})[0] == "Guess a number from 1 to 15:\n"
    assert env.step("8") == ("lower\n", -0.1, False, False, {"metrics": {"won": 0.0}})
    assert env.step("I think it is 4, not 5.") == ("higher\n", -0.1, False, False, {"metrics": {"won": 0.0}})
    assert env.step(" 5") == ("correct\n", 1.0, True, False, {"metrics": {"won": 1.0}})


@pytest.mark.parametrize("text", ["", "seven", "\u0663", "9" * 5000])
def test_a_text_without_a_number_loses(text):
    env = GuessNumber()
    env.reset(seed=0)
    answer, reward, terminated, truncated, _ = env.step(text)
    assert (answer, reward, terminated, truncated) == ("That is no number.\n", -1.0, True, False)


@pytest.mark.parametrize(("high", "turns"), [(7, 17 / 7), (15, 49 / 15)])
def test_the_best_player_halves_the_possible_numbers(high, turns):
    env = GuessNumber(high=high)
    episodes = [played(env, halves, 0, sample=with_number(number)) for number in range(1, high + 1)]
    assert sum(len(episode["rewards"]) for episode in episodes) / high == pytest.approx(turns)
    score = sum(sum(episode["rewards"]) for episode in episodes) / high
    assert score == pytest.approx(1 - 0.1 * (turns - 1))
    assert score == pytest.approx({7: 0.857, 15: 0.773}[high], abs=5e-4)  # as documented
    assert all(episode["metrics"] == {"won": 1.0} for episode in episodes)


@pytest.mark.parametrize("high", [7, 15])
def test_the_scripted_player_needs_the_comparisons_of_a_random_search_tree(high):
    harmonic = sum(1 / k for k in range(1, high + 1))
    expected = 1 - 0.1 * (2 * (1 + 1 / high) * harmonic - 4)
    assert mean_score(GuessNumber(high=high), scripted, 4000) == pytest.approx(expected, abs=0.007)
    assert expected == pytest.approx({7: 0.807, 15: 0.692}[high], abs=5e-4)


def test_the_number_is_drawn_uniformly_and_by_the_seed():
    env = GuessNumber(high=7)
    numbers = []
    for seed in range(3000):
        env.reset(seed=seed)
        numbers.append(env.number)
    assert {numbers.count(number) // 50 for number in range(1, 8)} <= {7, 8, 9}  # 429 of each, standard deviation 19
    again = GuessNumber(high=7)
    assert [again.reset(seed=seed) and again.number for seed in range(50)] == numbers[:50]


@pytest.mark.parametrize("reference", ["0", "16", "x", "-3", "1.5"])
def test_a_reference_that_is_no_possible_number_is_an_error(reference):
    with pytest.raises(ValueError, match="from 1 to 15"):
        GuessNumber().reset(seed=0, options={"sample": Sample("0", "", [reference])})
