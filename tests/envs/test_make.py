"""`env.vec_env` chooses between one process, one process an environment, and token by token."""

from __future__ import annotations

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from rl4lms_like.core.errors import ConfigError
from rl4lms_like.envs.make import make_vec_env
from rl4lms_like.envs.stepping import play_by_stepping
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers


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


def test_each_kind_is_what_its_name_says(env_kwargs):
    assert type(make_vec_env("text", 2, **env_kwargs)) is TextVecEnv
    dummy = make_vec_env("dummy", 2, **env_kwargs)
    assert type(dummy) is DummyVecEnv and dummy.num_envs == 2


def test_what_does_not_go_together_is_refused(env_kwargs):
    with pytest.raises(ConfigError, match="reward_workers: goes with vec_env 'text' only"):
        make_vec_env("dummy", 2, reward_workers=1, **env_kwargs)
    with pytest.raises(ConfigError, match="expected text, dummy or subproc, got 'ray'"):
        make_vec_env("ray", 2, **env_kwargs)
