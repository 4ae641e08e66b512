"""All games: determined by the seed, independent of who plays, and without global random numbers."""

from __future__ import annotations

import pickle

import pytest

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.core.sample import Sample
from tests.envs.games.conftest import played, scripted

SAMPLES = {
    "guess_number": Sample("0", "", ["4"]),
    "calculator": Sample("0", "3+14=", ["17"]),
    "word_game": Sample("0", "", ["tree"]),
    "shop": Sample("0", "", ["small red hat"]),
}
GAMES = list(SAMPLES)


@pytest.fixture(params=GAMES)
def game(request):
    return ENVIRONMENTS.get(request.param)


def test_equal_seeds_give_equal_episodes_whoever_plays(game, no_global_random_numbers):
    episode = played(game, scripted, 3)
    played(game, lambda env: "nothing", 4, max_turns=3)
    assert played(game, scripted, 3) == episode == played(type(game)(), scripted, 3)
    assert len({tuple(played(game, scripted, seed)["texts"]) for seed in range(20)}) > 10


def test_the_scripted_player_changes_nothing_in_the_environment(game):
    other = type(game)()
    assert game.reset(seed=5) == other.reset(seed=5)
    for _ in range(10):
        game.player()
    assert game.step("a?") == other.step("a?")
    assert game.np_random.bit_generator.state == other.np_random.bit_generator.state


def test_without_a_seed_the_random_numbers_continue(game):
    game.reset(seed=1)
    texts = {tuple(played_again(game)) for _ in range(20)}
    assert len(texts) > 10


def played_again(game) -> list[str]:
    texts = [game.reset()[0]]
    for _ in range(6):
        turn = game.player()
        text, _, terminated, truncated, _ = game.step(turn)
        texts += [turn, text]
        if terminated or truncated:
            break
    return texts


@pytest.mark.parametrize("id", GAMES)
def test_a_reference_replaces_what_is_drawn(id):
    game = ENVIRONMENTS.get(id)
    firsts = {game.reset(seed=seed, options={"sample": SAMPLES[id]})[0] for seed in range(20)}
    assert len(firsts) == (4 if id == "shop" else 1)  # of the shop, what the customer says first is drawn
    won = {"guess_number": ["4"], "calculator": ["17"], "word_game": [*"ter"], "shop": ["a small red hat"]}[id]
    game.reset(seed=0, options={"sample": SAMPLES[id]})
    steps = [game.step(turn) for turn in won]
    assert (steps[-1][1], steps[-1][2]) == (1.0, True)


def test_texts_of_any_kind_are_answered(game):
    for text in ("", " \n", "c" * 5000, "9" * 5000, "\u0663\u0664?", "😀", "size? colour? item?", "\x00"):
        game.reset(seed=0)
        answer, reward, terminated, truncated, info = game.step(text)
        assert isinstance(answer, str) and answer in game.observation_space
        assert isinstance(reward, float) and isinstance(terminated, bool) and truncated is False
        assert all(isinstance(number, float) for number in info["metrics"].values())


def test_a_game_can_be_pickled_within_an_episode(game):
    game.reset(seed=2)
    copy = pickle.loads(pickle.dumps(game))
    assert copy.player() == game.player()
