"""Games of TextArena: texts, rewards, and their random numbers, which stay apart from those of the run."""

from __future__ import annotations

import random

import numpy as np
import pytest
from gymnasium.utils.seeding import np_random

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.envs.adapters.textarena import TextArenaGame
from rl4lms_like.system.errors import ConfigError, MissingExtraError


@pytest.fixture
def game():
    pytest.importorskip("textarena")
    return TextArenaGame("GuessTheNumber-v0", {"min_number": 1, "max_number": 7})


def halved(env) -> tuple[list[str], list[float]]:
    """Texts and rewards of a player who halves the possible numbers."""
    low, high = 1, 7
    texts, rewards = [], []
    while True:
        guess = (low + high) // 2
        text, reward, terminated, truncated, _ = env.step(f"I guess [{guess}].")
        texts.append(text)
        rewards.append(reward)
        if terminated:
            return texts, rewards
        assert not truncated
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)


def test_an_episode_has_only_the_new_messages(game):
    first, info = game.reset(seed=1)
    assert first.count("Guess The Number") == 1 and "between 1 and 7" in first and info == {}
    texts, rewards = halved(game)
    assert all("Guess The Number" not in text and "I guess" not in text for text in texts)
    assert rewards[-1] == 1.0 and not any(rewards[:-1])
    assert texts[-1].strip()


def test_an_invalid_move_is_answered_and_the_second_one_loses(game):
    game.reset(seed=1)
    answer, *rest = game.step("seven")
    assert "invalid move" in answer and rest == [0.0, False, False, {"metrics": {"invalid_move": 0.0}}]
    answer, _, terminated, _, info = game.step("seven")
    assert terminated and answer.strip() and info["metrics"] == {"invalid_move": 1.0}


def test_the_seed_determines_a_game_and_the_global_random_numbers_are_left_alone(game):
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    played = []
    other = TextArenaGame("GuessTheNumber-v0", {"min_number": 1, "max_number": 7})
    for env in (game, other, game):
        env.reset(seed=3)
        played.append(halved(env))
    assert played[0] == played[1] == played[2]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    assert len({str(game.reset(seed=seed) and halved(game)) for seed in range(20)}) > 3


def test_a_game_that_draws_in_its_steps_is_that_of_the_package_while_another_one_plays():
    textarena = pytest.importorskip("textarena")
    env, other = TextArenaGame("Blackjack-v0"), TextArenaGame("Blackjack-v0")
    answers = [env.reset(seed=3)[0]]
    other.reset(seed=5)
    for _ in range(6):
        other.step("[Hit]")
        answers.append(env.step("[Hit]")[0])

    # The same game alone, with the global random numbers.
    game = textarena.make("Blackjack-v0-raw")
    state = random.getstate()
    game.reset(num_players=1, seed=int(np_random(3)[0].integers(2**31)))
    texts = []
    for _ in answers:
        messages = [text.strip() for _, text, kind in game.get_observation()[1] if kind.name != "PLAYER_ACTION"]
        texts.append("".join(f"{message}\n" for message in messages))
        game.step("[Hit]")
    random.setstate(state)
    assert answers == texts


def test_unknown_games_and_games_for_two_are_refused():
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=r"no game 'GuessNumber-v0'; similar: .*GuessTheNumber-v0"):
        ENVIRONMENTS.get("textarena", {"game": "GuessNumber-v0"})
    with pytest.raises(ConfigError, match="not a game for one player"):
        TextArenaGame("TicTacToe-v0").reset(seed=0)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    with pytest.raises(MissingExtraError, match=r"rl4lms_like\[textarena\]"):
        TextArenaGame("GuessTheNumber-v0")
