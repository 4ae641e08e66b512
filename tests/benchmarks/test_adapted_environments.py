"""The program that trains on a TextArena game and on a class for TRL."""

import itertools

import pytest

from benchmarks import adapted_environments
from benchmarks.adapted_environments import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_a_turn_of_the_scripted_player_follows_all_that_was_said_before(name, monkeypatch):
    if name == "textarena":
        pytest.importorskip("textarena")
    monkeypatch.setattr(adapted_environments, "N_PLAYED", 8)
    pairs = TASKS[name].played_turns()
    n_later = 0
    for (before, turn), (text, _) in itertools.pairwise(pairs):
        assert text.endswith("assistant:\n")
        if len(text) > len(before):
            assert text.startswith(f"{before}{turn}<|endoftext|>")
            n_later += 1
    assert n_later >= 4


def test_the_counter_pays_its_target():
    counter = adapted_environments.CounterEnv()
    counter.reset(target=3, prompt="Count to 3.")
    assert [counter.add(2), counter.get_reward(), counter.add(1), counter.get_reward()] == [2, 0.0, 3, 1.0]
