"""Critic and reference model on devices of their own: the same numbers as on one device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.settings import check_settings
from tests.builders import make_policy
from tests.config_errors import raises_at
from tests.policies.second_device import SECOND

KL = {"coeff": 0.05, "target_kl": 0.2}
EXACT = 1e-5  # ten times that for logged numbers: the explained variance divides two small ones


def config(id, folder, *, family="causal", args=(), kl=KL, policy=()) -> dict:
    return {
        "tokenizer": {"model_name": str(folder)},
        "reward_fn": {"id": "tests.builders:LowTokens"},
        "datapool": {"id": "dummy_pool", "args": {"prompt": "Count with me:", "n_samples": 6}},
        "env": {
            "n_envs": 4,
            "args": {
                "max_prompt_length": 16,
                "max_episode_length": 5,
                "terminate_on_eos": True,
                "context_start_token": 0,
            },
        },
        "alg": {
            "id": id,
            "args": {"n_steps": 5, "batch_size": 10, "n_epochs": 1, "learning_rate": 1e-3} | dict(args),
            "kl_div": kl,
            "policy": {
                "id": f"{family}_lm_actor_critic_policy",
                "args": {
                    "model_name": str(folder),
                    "optimizer_kwargs": {"eps": 1e-4, "fused": False},
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 5},
                }
                | dict(policy),
            },
        },
        "train_evaluation": {"n_iters": 2, "eval_every": 9, "save_every": 1, "eval_batch_size": 4, "metrics": []},
        "device": "cpu",
    }


def test_a_second_device_changes_no_number(tiny_gpt2_dir, tiny_t5_dir, tmp_path):
    """The device is one that a program of its own registers: a machine for tests has no two accelerators."""
    masks = {"mask_type": "learned_top_k", "top_mask": 250, "target_update_iterations": 1}
    full = {"coeff": 0.05, "estimator": "full", "placement": "loss"}
    head = {"value_head_init": "default"}  # with values of 0, rounding errors would become full steps of the critic
    configs = [
        config("ppo", tiny_gpt2_dir, policy=head),
        config("ppo", tiny_t5_dir, family="seq2seq", policy=head),
        config("nlpo", tiny_gpt2_dir, family="maskable_causal", policy=masks | head),
        config(
            "grpo",
            tiny_gpt2_dir,
            args={"group_size": 4, "reference_update_iterations": 1, "reference_mixing": 0.5},
            kl=full,
        ),
    ]
    file = tmp_path / "configs.json"
    file.write_text(json.dumps(configs))
    command = [sys.executable, "-m", "tests.policies.devices_program", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each["id"] for each in found] == ["ppo", "ppo", "nlpo", "grpo"]
    for each in found:
        assert each["devices"] == ["cpu", None if each["id"] == "grpo" else SECOND, SECOND]
        assert each["weights"] < EXACT and max(each["numbers"].values()) < 10 * EXACT and each["n_numbers"] > 20, each
        assert each["resumed"] == 0, each


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        ({"critic_device": "cpu", "critic": "shared"}, ["critic_device"]),
        ({"critic_device": "cpu", "reference_device": "cpu", "peft": {"r": 2}}, ["critic_device", "reference_device"]),
    ],
)
def test_devices_that_a_network_cannot_have_are_refused(policy, wrong, tiny_gpt2_dir):
    with raises_at(*(f"alg.policy.args.{key}" for key in wrong)):
        parse_config(config("ppo", tiny_gpt2_dir, policy=policy))
    with raises_at(*wrong):
        make_policy("causal", tiny_gpt2_dir, **policy)


def test_each_of_several_processes_has_one_device(tiny_gpt2_dir, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with raises_at("alg.policy.args.reference_device"):
        parse_config(config("ppo", tiny_gpt2_dir, policy={"reference_device": "cpu"}))


def test_an_algorithm_without_critic_places_none(tiny_gpt2_dir):
    with raises_at("alg.policy.args.critic_device"):
        parse_config(config("grpo", tiny_gpt2_dir, args={"group_size": 4}, policy={"critic_device": "cpu"}))


def test_a_device_that_is_none_is_named(tiny_gpt2_dir):
    with raises_at("alg.policy.args.critic_device"):
        check_settings(parse_config(config("ppo", tiny_gpt2_dir, policy={"critic_device": "nowhere:1"})))
