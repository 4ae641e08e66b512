"""`env.vec_env` chooses between one process, one process an environment, and token by token."""

from __future__ import annotations

import os
import sys

import cloudpickle
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from rl4lms_like.envs.stepping import make_vec_env, play_by_stepping
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.system.errors import RewardError, RL4LMsLikeError
from tests.config_errors import raises_at


@pytest.fixture
def env_kwargs(tiny_tokenizer, samples):
    return {
        "tokenizer": tiny_tokenizer,
        "reward_function": RewardIncreasingNumbers(min_tokens=2),
        "samples": samples,
        "max_episode_length": 6,
        "max_prompt_length": 8,
        "terminate_on_eos": True,
    }


def test_processes_of_their_own_pay_the_same_and_are_seeded(env_kwargs, batch_of, tiny_tokenizer):
    responses = [[*tiny_tokenizer(text)["input_ids"][:5], 1] for text in (" 1 2 3", " 7 words 9")]
    episodes = batch_of(responses)
    one_process = make_vec_env("text", 2, **env_kwargs)
    one_process.reset()
    processes = make_vec_env("subproc", 2, **env_kwargs)
    try:
        assert isinstance(processes, SubprocVecEnv)
        prompts = []
        for _ in range(2):
            processes.seed(3)
            prompts.append(processes.reset())
        assert all(np.array_equal(prompts[0][key], prompts[1][key]) for key in prompts[0])
        rewards = play_by_stepping(processes, episodes).total
        np.testing.assert_array_equal(rewards, one_process.play(episodes))
        assert rewards.max() > 0
    finally:
        processes.close()


class Fails(RewardFunction):
    """Fails at the third token; at the ninth its process ends."""

    def __init__(self):
        self.n = 0

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        self.n += 1
        if self.n == 9:
            os._exit(3)
        return {}["topic"] if self.n == 3 else 0.0


def test_processes_that_the_system_does_not_start_are_named_with_the_key(env_kwargs, monkeypatch):
    def refused(*_, **__):
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr("rl4lms_like.envs.stepping.ProcessVecEnv", refused)
    with pytest.raises(RL4LMsLikeError, match=r"2 .*'subproc' .*too long"):
        make_vec_env("subproc", 2, **env_kwargs)


@pytest.mark.parametrize("kind", ["dummy", "subproc"])
def test_a_reward_that_fails_token_by_token_is_named(kind, env_kwargs, batch_of, capfd):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    env = make_vec_env(kind, 1, **env_kwargs | {"reward_function": Fails(), "terminate_on_eos": False})
    try:
        env.reset()
        (asked,) = env.get_attr("sample")
        with pytest.raises(RewardError, match=r"Fails .* 3 .*KeyError: 'topic'") as error:
            play_by_stepping(env, batch_of([[40] * 6]))
        (text,) = error.value.texts
        assert text["sample_id"] == asked.id and text["generated_text"]
        if kind == "subproc":
            env.reset()
            with pytest.raises(RewardError, match="'subproc'"):
                play_by_stepping(env, batch_of([[40] * 6]))
        assert "Traceback" not in capfd.readouterr().err
    finally:
        env.close()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert not any(process.is_alive() for process in getattr(env, "processes", ()))


def test_a_process_of_an_environment_that_ended_is_named_whatever_is_asked_of_it(env_kwargs):
    env = make_vec_env("subproc", 1, **env_kwargs)
    try:
        env.reset()
        env.processes[0].kill()
        env.processes[0].join()
        for ask in (
            env.reset,
            lambda: env.env_method("state_dict"),
            lambda: env.get_attr("sample"),
            lambda: env.step_async(np.array([40])),
            env.step_wait,
        ):
            with pytest.raises(RewardError, match="'subproc'"):
                ask()
    finally:
        env.close()


def test_each_kind_is_what_its_name_says(env_kwargs):
    assert type(make_vec_env("text", 2, **env_kwargs)) is TextVecEnv
    dummy = make_vec_env("dummy", 2, **env_kwargs)
    assert type(dummy) is DummyVecEnv and dummy.num_envs == 2


def test_what_does_not_go_together_is_refused(env_kwargs):
    with pytest.raises(TypeError, match="reward_workers"):
        make_vec_env("dummy", 2, reward_workers=1, **env_kwargs)
    with raises_at("vec_env", mentions="'ray'"):
        make_vec_env("ray", 2, **env_kwargs)
