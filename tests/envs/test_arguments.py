"""The config's arguments of the environment are the environment's."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers

INJECTED = {
    *("tokenizer", "reward_function", "samples", "vocab_size", "eos_token_ids", "make_sampler", "stop_strings"),
    *("is_encoder_decoder", "pictures"),
}


def parameters(constructor) -> dict:
    named = inspect.signature(constructor).parameters
    return {name: parameter.default for name, parameter in named.items()}


def test_the_environment_takes_the_config_s_arguments_with_its_defaults():
    in_config = {field.name: field.default for field in fields(EnvArguments)}
    own = parameters(TextGenEnv)
    assert {name: own[name] for name in in_config} == in_config
    assert set(own) == set(in_config) | INJECTED


def test_the_vectorised_environment_passes_its_arguments_on(tiny_tokenizer, samples):
    reward = RewardIncreasingNumbers(min_tokens=2)
    env = TextVecEnv(2, tiny_tokenizer, reward, samples, 6, max_prompt_length=8, terminate_on_eos=True)
    assert [(each.max_episode_length, each.layout.max_prompt_length) for each in env.envs] == [(6, 8)] * 2
    assert all(each.terminate_on_eos for each in env.envs)
    with pytest.raises(TypeError, match="max_length"):
        TextVecEnv(2, tiny_tokenizer, reward, samples, max_length=6)


def test_the_arguments_load_no_torch():
    program = "import sys, rl4lms_like.envs.arguments; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"
