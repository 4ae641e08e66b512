"""Moments in main memory between updates: where they are, the same bytes, the estimate, keys that may change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.estimates.memory import estimate_memory
from rl4lms_like.policies.base import CausalLMActorCriticPolicy
from rl4lms_like.run import resume, train_config
from rl4lms_like.testing import models
from rl4lms_like.training.resuming.states import optimizer_state
from tests.builders import SAMPLING, make_env
from tests.policies.second_device import SECOND

OFFLOADED = {"offload": "moments", "activation_offload": True}


def test_moments_are_in_main_memory_outside_of_updates(tmp_path, tiny_tokenizer):
    """The device is one that a program of its own registers. The model has matrices that are stored in 8 bits."""
    pytest.importorskip("torchao")
    model = models.make_causal_lm("gpt2", tiny_tokenizer, hidden_size=64, n_layers=1)
    folder = models.save_model(tmp_path / "wide", model, tiny_tokenizer)
    command = [sys.executable, "-m", "tests.policies.offload_program", str(folder), "adamw", "adamw_8bit"]
    # torchao compiles steps on an accelerator, and torch's compiler does not know this one.
    eager = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=eager)
    assert done.returncode == 0, done.stderr

    device = SECOND.partition(":")[0]
    for seen in json.loads(done.stdout.splitlines()[-1]).values():
        # The first rollout has two generation batches and no moments, since no step has been made.
        assert seen["in_generation"] == [[], [], ["cpu"], ["cpu"]]
        assert seen["in_steps"] == [[device]] * 16
        assert seen["at_the_end"] == ["cpu"] and seen["without"] == [device]
        assert seen["n_different"] == 0 < seen["n_equal"]


def test_a_run_has_the_bytes_of_one_without_and_the_keys_may_change(tiny_config, tmp_path):
    """With moments and activations in main memory."""
    tiny_config["train_evaluation"] |= {"n_iters": 2, "max_eval_samples": 2, "save_every": 1}
    folders = []
    for name in ("without", "with"):
        config = parse_config(tiny_config)
        folders.append(train_config(config, base_path_to_store_results=tmp_path, experiment_name=name, quiet=True))
        tiny_config["alg"]["policy"]["args"] |= OFFLOADED
    expected, offloaded = map(bytes_of, folders)
    assert len(expected) == 2 * 2 + 1 and offloaded == expected

    # The second half of a run without them.
    copy = tmp_path / "copy"
    shutil.copytree(folders[0], copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(copy / "checkpoints" / "iteration_00002")
    resume(copy, values={f"alg.policy.args.{key}": value for key, value in OFFLOADED.items()}, quiet=True)
    assert bytes_of(copy) == expected


def test_a_saved_algorithm_has_the_same_numbers_and_goes_on(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    moments = []
    for name, keys in (("without", {}), ("with", OFFLOADED)):
        kwargs = {"model_name": str(tiny_gpt2_dir), "generation_kwargs": SAMPLING, **keys}
        env = make_env(tiny_tokenizer, tiny_gpt2_dir)
        policy = CausalLMActorCriticPolicy
        algorithm = PPO(policy, env, n_steps=10, batch_size=40, n_epochs=1, policy_kwargs=kwargs, seed=0)
        algorithm.learn(40)
        algorithm.save(tmp_path / name)
        loaded = PPO.load(tmp_path / name, env=make_env(tiny_tokenizer, tiny_gpt2_dir), device="cpu")
        assert loaded.policy.arguments.offload == keys.get("offload")
        moments.append(optimizer_state(loaded.policy.optimizer)[0])
        loaded.learn(40)
        moments.append(optimizer_state(loaded.policy.optimizer)[0])
    saved, continued, *offloaded = moments
    for expected, found in zip((saved, continued), offloaded, strict=True):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def bytes_of(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize("gpu_bytes", [10**12, None])
def test_the_rollout_has_the_memory_of_the_moments_on_a_gpu(tiny_config, gpu_bytes):
    without = estimate_memory(parse_config(tiny_config), gpu_bytes=gpu_bytes)
    tiny_config["alg"]["policy"]["args"]["offload"] = "moments"
    estimate = estimate_memory(parse_config(tiny_config), gpu_bytes=gpu_bytes)

    # On a CPU, main memory is where they are anyway. The process itself grows between two estimates.
    moments = without.parts["optimizer state"] if gpu_bytes else 0
    process = estimate.parts["process"] - without.parts["process"]
    assert estimate.update - without.update == process
    assert without.rollout - estimate.rollout == moments - process
