"""A run keeps the speedups of its start: a new one stores them all, one of an earlier version has none."""

from __future__ import annotations

import json
import shutil

import pytest
from stable_baselines3.common.policies import ActorCriticPolicy

from rl4lms_like.config.load import parse_config
from rl4lms_like.policies.speedups import PATH, all_speedups, no_speedups
from rl4lms_like.run import train_config
from rl4lms_like.system.schema import at
from rl4lms_like.training.resuming.resume import as_started, find_unfinished, own_config, resumption
from tests.conftest import REPOSITORY
from tests.training.resuming.test_resume import blocks

FEW = {"train_evaluation": {"eval_batch_size": 6, "n_iters": 3, "eval_every": 9, "save_every": 1, "metrics": []}}


class WithoutSpeedups(ActorCriticPolicy):
    """A user's policy, which has a model but not the argument `speedups`."""

    def __init__(self, observation_space, action_space, lr_schedule, *, model_name: str) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def command(tiny_gpt2_dir):
    """Blocks of a config that names no speedups."""
    return blocks("causal", tiny_gpt2_dir, "ppo") | FEW


@pytest.fixture(scope="module")
def mapping(command):
    """Blocks of the stopped run, which was started without any."""
    return with_block(command, no_speedups())


def with_block(command, block):
    policy = command["alg"]["policy"]
    policy = {**policy, "args": {**policy["args"], "speedups": block}}
    return {**command, "alg": {**command["alg"], "policy": policy}}


def stored(folder):
    return at(json.loads((folder / "config.json").read_text()), PATH)


def test_a_new_run_stores_all_of_them(command, tmp_path):
    few = {**command, "train_evaluation": {**FEW["train_evaluation"], "n_iters": 0}}
    assert stored(train_config(parse_config(few), base_path_to_store_results=tmp_path, quiet=True)) == all_speedups()


def test_the_same_command_keeps_those_of_the_run(command, stopped, tmp_path):
    run, _ = find_unfinished(parse_config(command), stopped)
    run.lock.release()
    assert at(run.config.to_dict(), PATH) == no_speedups()
    folder = train_config(parse_config(command), base_path_to_store_results=tmp_path, experiment_name="run", quiet=True)
    assert folder == stopped and stored(folder) == no_speedups()


def test_a_command_with_another_one_is_of_another_run(command, stopped):
    config = parse_config(with_block(command, {"keep_freed_memory": True}))
    run, _ = find_unfinished(config, stopped)  # it changes no number
    run.lock.release()
    assert at(run.config.to_dict(), PATH) == no_speedups() | {"keep_freed_memory": True}
    config = parse_config(with_block(command, {"sampler_log_probs": True}))
    assert find_unfinished(config, stopped)[0] is None  # it changes rounding


def test_a_run_of_an_earlier_version_is_resumed_without_them(tmp_path):
    folder = shutil.copytree(REPOSITORY / "tests" / "data" / "run_0_2_0" / "stopped", tmp_path / "stopped")
    assert at(resumption(folder).config.to_dict(), PATH) == no_speedups()
    changed = resumption(folder, [f"{PATH}.keep_freed_memory=true"]).config.to_dict()
    assert at(changed, PATH) == no_speedups() | {"keep_freed_memory": True}


def test_the_policy_of_a_user_may_have_none(command, tmp_path):
    policy = {"id": f"{__name__}:WithoutSpeedups", "args": {"model_name": "some/model"}}
    config = as_started(parse_config({**command, "alg": {**command["alg"], "policy": policy}}), "2026-01-01")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert parse_config(own_config(tmp_path)).alg.policy.args == {"model_name": "some/model"}
