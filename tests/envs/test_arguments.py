"""The config's arguments of the environment are the environment's."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.vec_env import TextVecEnv

INJECTED = {"tokenizer", "reward_function", "samples", "vocab_size", "eos_token_ids"}


def parameters(constructor) -> dict:
    named = inspect.signature(constructor).parameters
    return {name: parameter.default for name, parameter in named.items()}


def test_both_environments_take_the_config_s_arguments_with_its_defaults():
    in_config = {field.name: field.default for field in fields(EnvArguments)}
    for constructor in (TextGenEnv, TextVecEnv):
        own = parameters(constructor)
        assert {name: own[name] for name in in_config} == in_config
    assert set(parameters(TextGenEnv)) == set(in_config) | INJECTED
    assert set(parameters(TextVecEnv)) == set(in_config) | INJECTED | {"n_envs", "reward_workers", "reward_timeout"}


def test_the_arguments_load_no_torch():
    program = "import sys, rl4lms_like.envs.arguments; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"
