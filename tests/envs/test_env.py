"""TextGenEnv is a well-behaved Gymnasium environment with RL4LMs' observations, infos and ends."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs import ENV_ID
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.rewards import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.system.errors import DataPoolError, RewardError
from rl4lms_like.testing import models
from tests.config_errors import raises_at

EOS = 1


class Recorder(RewardFunction):
    """Pays 1 for every token and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        self.calls.append((prev_observation, action, current_observation, done, meta_info))
        return 1.0


class BatchRecorder(BatchedRewardFunction):
    """Pays 0.5 for every entry and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        self.calls.append((prompt_texts, gen_texts, ref_texts, dones, meta_infos))
        return [0.5] * len(dones)


@pytest.fixture
def make_env(tiny_tokenizer, samples):
    def make(**changes):
        arguments = {"max_episode_length": 4, "max_prompt_length": 8, "terminate_on_eos": True}
        given = {"tokenizer": tiny_tokenizer, "reward_function": Recorder(), "samples": samples}
        return TextGenEnv(**(given | arguments | changes))

    return make


@pytest.mark.parametrize("context_start_token", [None, 0])
def test_passes_gymnasium_s_checker_without_a_warning(tiny_tokenizer, samples, context_start_token):
    env = gymnasium.make(
        ENV_ID,
        tokenizer=tiny_tokenizer,
        reward_function=RewardIncreasingNumbers(min_tokens=4),
        samples=samples,
        max_episode_length=5,
        max_prompt_length=8,
        terminate_on_eos=True,
        context_start_token=context_start_token,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


@pytest.mark.parametrize("first", ["gymnasium, rl4lms_like", "rl4lms_like, gymnasium"])
def test_gymnasium_finds_the_environment_once_the_library_is_imported(first):
    """A fresh process: nothing but the two imports has happened, and no torch is loaded until `make`."""
    found = f"gymnasium.spec({ENV_ID!r}); assert 'torch' not in sys.modules"
    program = f"import sys, {first}; {found}; gymnasium.make({ENV_ID!r})"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "TypeError" in outcome.stderr and "tokenizer" in outcome.stderr, outcome.stderr  # its arguments are missing


def test_eos_terminates_and_the_length_limit_truncates(make_env):
    env = make_env()
    env.reset(seed=0)
    assert [env.step(token)[2:4] for token in (5, EOS)] == [(False, False), (True, False)]
    env.reset()
    assert [env.step(token)[2:4] for token in (5, 5, 5, 5)] == [(False, False)] * 3 + [(False, True)]
    env.reset()
    assert [env.step(token)[2:4] for token in (5, 5, 5, EOS)][-1] == (True, False)  # both hold: terminated wins


def test_without_terminate_on_eos_only_the_limit_ends(make_env):
    env = make_env(terminate_on_eos=False)
    env.reset(seed=0)
    assert [env.step(EOS)[2:4] for _ in range(4)] == [(False, False)] * 3 + [(False, True)]


def test_any_of_several_end_tokens_terminates(make_env):
    env = make_env(eos_token_ids=[EOS, 9])
    for token in (EOS, 9):
        env.reset()
        assert env.step(token)[2]


def test_the_reward_sees_done_however_the_episode_ends(make_env):
    env = make_env()
    for tokens in ([5, EOS], [5, 5, 5, 5]):
        env.reward_function.calls.clear()
        env.reset()
        for token in tokens:
            env.step(token)
        dones = [call[3] for call in env.reward_function.calls]
        assert dones == [False] * (len(tokens) - 1) + [True]


def test_the_reward_sees_the_state_before_and_after_the_token(make_env, tiny_tokenizer):
    env = make_env()
    sample = Sample("s", "The film", ["reference"], {"topic": 3})
    env.reset(options={"sample": sample})
    ids = tiny_tokenizer(" was good")["input_ids"][:3]
    for token in ids:
        env.step(token)
    for n_actions, (previous, action, current, _, meta_info) in enumerate(env.reward_function.calls):
        assert action == ids[n_actions]
        assert previous.context_text == tiny_tokenizer.decode(ids[:n_actions])
        assert current.context_text == tiny_tokenizer.decode(ids[: n_actions + 1])
        assert current.prompt_or_input_text == "The film"
        assert current.target_or_reference_texts == ["reference"]
        assert meta_info == current.meta_info == {"topic": 3}


def test_info_has_rl4lms_keys_and_shares_nothing(make_env):
    env = make_env()
    sample = Sample("s", "The film", ["reference"], {"topics": [3]})
    env.reset(options={"sample": sample})
    first = env.step(40)[4]
    second = env.step(41)[4]
    assert set(second) == {"output", "action_history", "reference_text", "prompt_text", "prev_output", "meta_info"}
    assert second["prev_output"] == first["output"] != second["output"]
    assert len(second["action_history"]) == 2
    second["meta_info"]["topics"].append(4)
    second["reference_text"].clear()
    assert sample == Sample("s", "The film", ["reference"], {"topics": [3]})


def test_a_batched_reward_is_called_with_a_batch_of_one(make_env):
    env = make_env(reward_function=BatchRecorder())
    env.reset(options={"sample": Sample("s", "The film", ["r"], {"k": 1})})
    assert env.step(40)[1] == 0.5
    output = env.step(EOS)[4]["output"]
    assert env.reward_function.calls[-1] == (["The film"], [output], [["r"]], [True], [{"k": 1}])


@pytest.mark.parametrize("recorder", [Recorder, BatchRecorder])
def test_a_terminal_reward_is_called_for_the_last_token_only(make_env, monkeypatch, recorder):
    monkeypatch.setattr(recorder, "terminal", True)
    env = make_env(reward_function=recorder())
    env.reset()
    paid = [env.step(token)[1] for token in (5, 5, 5, 5)]
    assert paid[:3] == [0.0, 0.0, 0.0] and paid[3] > 0
    assert len(env.reward_function.calls) == 1


def test_a_failing_reward_is_attributed(make_env):
    def broken(previous, action, current, done, meta_info=None):
        raise KeyError("topic")

    env = make_env(reward_function=broken)
    env.reset(options={"sample": Sample("s7", "The film")})
    with pytest.raises(RewardError, match=r"broken .* 1 .*'s7' .*'The film'.*KeyError"):
        env.step(5)


def test_equal_seeds_give_equal_prompts(make_env):
    def prompts(seed):
        env = make_env()
        env.reset(seed=seed)
        return [env.sample.id, *(env.reset() and env.sample.id for _ in range(20))]

    assert prompts(3) == prompts(3) != prompts(4)


def test_the_action_space_has_the_model_s_rows(make_env, tiny_tokenizer):
    assert make_env(vocab_size=384).action_space.n == 384
    assert make_env().action_space.n == len(tiny_tokenizer)


def test_a_finished_episode_must_be_reset(make_env):
    env = make_env()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(5)
    env.reset()
    env.step(EOS)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(5)


def test_the_prompt_limit_defaults_to_the_tokenizer_s(make_env, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 12
    space = make_env(tokenizer=tokenizer, max_prompt_length=None).observation_space
    assert space["prompt_or_input_encoded_pt"].shape == (12,)
    tokenizer.model_max_length = int(1e30)
    with raises_at("max_prompt_length"):
        make_env(tokenizer=tokenizer, max_prompt_length=None)


def test_terminating_on_an_eos_that_does_not_exist_is_refused(make_env, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.eos_token = None
    with raises_at("terminate_on_eos"):
        make_env(tokenizer=tokenizer)
    assert make_env(tokenizer=tokenizer, terminate_on_eos=False).eos_token_ids == frozenset()


def test_nothing_to_draw_from_is_refused(make_env):
    with pytest.raises(DataPoolError):
        make_env(samples=[])


def test_the_tokenizer_is_left_as_it_was_found(make_env, tmp_path):
    tokenizer = models.make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "before")
    env = make_env(tokenizer=tokenizer, prompt_truncation_side="left", max_prompt_length=3)
    side = tokenizer.truncation_side
    env.reset(options={"sample": Sample("s", "a long prompt that has to be cut somewhere")})
    tokenizer.save_pretrained(tmp_path / "after")
    assert tokenizer.truncation_side == side
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "before" / name).read_text() == (tmp_path / "after" / name).read_text()


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_prompts_are_cut_on_the_side_asked_for(make_env, tiny_tokenizer, side):
    text = "Count with me: 0 1 2 3 4 5 6 7 8 9 10"
    whole = tiny_tokenizer(text)["input_ids"]
    observation, _ = make_env(prompt_truncation_side=side).reset(options={"sample": Sample("s", text)})
    expected = whole[-8:] if side == "left" else whole[:8]
    np.testing.assert_array_equal(observation["prompt_or_input_encoded_pt"], expected)


def test_returned_observations_never_change_later(make_env):
    env = make_env(terminate_on_eos=False)
    observation, _ = env.reset(seed=1)
    seen = [(observation, copy.deepcopy(observation))]
    for token in (5, 6, 7, 8):
        observation = env.step(token)[0]
        seen.append((observation, copy.deepcopy(observation)))
    for given, kept in seen:
        assert all(np.array_equal(given[key], kept[key]) for key in kept)
        assert given in env.observation_space


def test_observations_that_a_reward_keeps_never_change(make_env):
    env = make_env()
    for token in (40, 41):
        env.reset()
        for _ in range(4):
            env.step(token)
    kept = [call[2].action_ids.tolist() for call in env.reward_function.calls]
    assert kept == [[token] * length for token in (40, 41) for length in range(1, 5)]


def test_a_sibling_has_an_episode_of_its_own(make_env):
    env = make_env()
    env.reset()
    env.step(40)
    sibling = env.sibling()
    with pytest.raises(gymnasium.error.ResetNeeded):
        _ = sibling.sample
    sibling.reset()
    sibling.step(41)
    assert (env.observation.action_ids.tolist(), sibling.observation.action_ids.tolist()) == ([40], [41])
