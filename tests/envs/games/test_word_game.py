"""The word game: answers, wrong turns, and the best score by a search over the sets of possible words."""

from __future__ import annotations

from functools import cache

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.games.word_game import WORDS, WordGame
from tests.envs.games.conftest import mean_score, played, scripted


def with_word(word: str) -> dict[str, Sample]:
    return {"sample": Sample("0", "", [word])}


def test_an_episode():
    env = WordGame()
    assert env.reset(seed=0, options=with_word("book"))[0] == "____\n"
    assert env.step(" O, I think")[:4] == ("_oo_\n", 0.0, False, False)
    assert env.step("o")[:3] == ("_oo_\n", -0.1, False)  # tried before
    assert env.step("b")[:2] == ("boo_\n", 0.0)
    assert env.step("123")[:2] == ("boo_\n", -0.1)
    assert env.step("k") == ("book\n", 1.0, True, False, {"metrics": {"won": 1.0, "wrong": 2.0}})


def test_the_last_wrong_turn_loses():
    env = WordGame(lives=2)
    env.reset(seed=0, options=with_word("book"))
    assert env.step("x")[:3] == ("____\n", -0.1, False)
    assert env.step("y") == ("The word is book.\n", -0.1, True, False, {"metrics": {"won": 0.0, "wrong": 2.0}})


@cache
def best(words: tuple[str, ...], n_wrong: int) -> tuple[float, str]:
    """Best expected points from here on, and the letter to try."""
    if n_wrong == 6:
        return 0.0, ""
    if len(words) == 1:
        return 1.0, ""
    value, choice = -1.0, ""
    for letter in sorted(set("".join(words))):
        groups: dict[tuple[int, ...], list[str]] = {}
        for word in words:
            groups.setdefault(tuple(i for i in range(4) if word[i] == letter), []).append(word)
        if len(groups) == 1:  # nothing is learned
            continue
        expected = 0.0
        for places, group in groups.items():
            points = best(tuple(group), n_wrong + (not places))[0]
            expected += len(group) / len(words) * (points if places else points - 0.1)
        if expected > value + 1e-12:
            value, choice = expected, letter
    return value, choice


def search(env: WordGame) -> str:
    possible = env.possible
    if len(possible) == 1:
        return sorted(set(possible[0]) - env.tried)[0]
    return best(tuple(possible), env.n_wrong)[1]


def test_the_best_score_is_that_of_the_documentation():
    expected, _ = best(WORDS, 0)
    env = WordGame()
    episodes = [played(env, search, 0, **with_word(word)) for word in WORDS]
    assert sum(sum(episode["rewards"]) for episode in episodes) / len(WORDS) == pytest.approx(expected)
    assert expected == pytest.approx(0.82)


def test_the_score_of_the_scripted_player():
    assert mean_score(WordGame(), scripted, 2500) == pytest.approx(0.47, abs=0.03)


@pytest.mark.parametrize("word", ["", "Bo ok", "b3", "naïve", "a" * 21])
def test_a_reference_that_is_no_word_is_an_error(word):
    with pytest.raises(ValueError, match="no word"):
        WordGame().reset(seed=0, options=with_word(word))


def test_a_word_that_is_not_in_the_list_can_be_played():
    env = WordGame(lives=30)
    assert played(env, scripted, 0, **with_word("zebra"))["metrics"]["won"] == 1.0


def test_the_words_are_drawn_uniformly():
    env = WordGame()
    counts = dict.fromkeys(WORDS, 0)
    for seed in range(4000):
        env.reset(seed=seed)
        counts[env.word] += 1
    assert min(counts.values()) > 140 and max(counts.values()) < 260  # 200 of each, standard deviation 14
