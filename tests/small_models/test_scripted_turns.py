"""Small models that learn from the scripted player of an environment."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl4lms_like import ENVIRONMENTS
from rl4lms_like.config.load import parse_config
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.episodes import NumberedEpisodes
from rl4lms_like.envs.games.calculator import Calculator
from rl4lms_like.envs.games.guess_number import GuessNumber
from rl4lms_like.small_models.embedded import with_embedded_models
from rl4lms_like.small_models.scripted_turns import N_EPISODES, has_player, turns_of_player
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.registry import Entry
from tests.training.test_dialogue_runs import run_blocks

END = "<|endoftext|>"
SAMPLES = [sample for sample, _ in NumberedEpisodes.prepare("train")]


def test_pairs_are_everything_before_a_turn_and_the_turn():
    pairs = turns_of_player(GuessNumber(high=7), SAMPLES, max_turns=3, seed=0)
    firsts = [index for index, (prompt, _) in enumerate(pairs) if END not in prompt]
    assert len(firsts) == N_EPISODES
    for (prompt, turn), (later, _) in itertools.pairwise(pairs):
        assert 1 <= int(turn) <= 7
        if END in later:
            assert later in (f"{prompt}{turn}{END}higher\n", f"{prompt}{turn}{END}lower\n")
    assert max(prompt.count(END) for prompt, _ in pairs) == 2  # no more than three turns
    assert pairs == turns_of_player(GuessNumber(high=7), SAMPLES, max_turns=3, seed=0)
    assert pairs != turns_of_player(GuessNumber(high=7), SAMPLES, max_turns=3, seed=1)


def test_samples_are_used_one_after_the_other():
    samples = [Sample("0", "1+2=", ["3"]), Sample("1", "1+3=", ["4"])]
    prompts = [prompt for prompt, _ in turns_of_player(Calculator(), samples, 4, seed=0) if END not in prompt]
    assert prompts == ["1+2=\n", "1+3=\n"] * (N_EPISODES // 2)


def test_messages_are_refused():
    class Messages(GuessNumber):
        def step(self, action):
            answer, *rest = super().step(action)
            return [{"role": "user", "content": answer}], *rest

    with pytest.raises(ModelError, match="messages"):
        turns_of_player(Messages(), SAMPLES, 3, seed=0)


def test_a_failing_environment_is_named_with_its_sample():
    class Broken(GuessNumber):
        def player(self):
            raise KeyError("x")

    with pytest.raises(ModelError, match=f"Broken with sample '{SAMPLES[0].id}' failed while its .*: KeyError: 'x'"):
        turns_of_player(Broken(), SAMPLES, 3, seed=0)


def test_who_has_a_player():
    assert has_player(GuessNumber())
    assert not has_player(object())


class Plain:
    """An environment that is no `gymnasium.Env`, and has no method `close`."""

    def reset(self, *, seed=None, options=None):
        return "Say a:\n", {}

    def step(self, action):
        return "", 1.0, True, False, {}

    def player(self):
        return "a"


def test_an_environment_without_close_can_teach_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENTS._table, "plain", Entry(Plain, "a function or class of another kind"))
    blocks = run_blocks("embedded/tiny_model")
    blocks["env"]["dialogue"] = {"id": "plain", "max_turns": 1, "max_turn_length": 2}
    blocks["tiny_model"] = {"steps": 1, "batch_size": 2, "n_layer": 1}
    assert with_embedded_models(parse_config(blocks)).tokenizer.model_name.startswith(str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL4LMS_LIKE_HOME", str(tmp_path_factory.mktemp("cache")))
        blocks = run_blocks("embedded/tiny_model")
        blocks["env"]["dialogue"] = {"id": "guess_number", "args": {"high": 7}, "max_turns": 7, "max_turn_length": 2}
        blocks["tiny_model"] = {"steps": 120, "batch_size": 32, "n_layer": 1, "wrong_answers": 0.0}
        yield with_embedded_models(parse_config(blocks)).tokenizer.model_name


@torch.no_grad()
def test_the_model_plays_by_the_rules(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, _ = GuessNumber(high=7).reset(seed=0)
    numbers = [tokenizer(str(number))["input_ids"][0] for number in range(1, 8)]
    for prompt in (first, f"{first}4{END}lower\n", f"{first}2{END}higher\n5{END}lower\n"):
        probabilities = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].softmax(0)
        assert probabilities[numbers].sum() > 0.9
    after = model(**tokenizer(f"{first}4", return_tensors="pt")).logits[0, -1].softmax(0)
    assert after[tokenizer.eos_token_id] > 0.9
