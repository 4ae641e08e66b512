"""Adapters on a frozen model learn the toy reward."""

from __future__ import annotations

import pytest

from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.rollouts.kl import AdaptiveKLController
from rl4lms_like.testing import models
from tests.builders import POLICIES, SAMPLING, make_env

pytest.importorskip("peft")

SETTINGS = {"n_steps": 20, "batch_size": 160, "n_epochs": 4, "learning_rate": 1e-2}
PEFT = {"r": 8, "lora_alpha": 16, "target_modules": ["c_attn", "c_proj", "c_fc"]}


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_reward_rises(critic, tiny_tokenizer, tmp_path):
    # A frozen output layer can prefer a token only as far as its weights reach: they must not be tiny.
    model = models.make_causal_lm("gpt2", tiny_tokenizer, scale=10)
    model_dir = models.save_model(tmp_path / "model", model, tiny_tokenizer)
    algorithm = PPO(
        POLICIES["causal"],
        make_env(tiny_tokenizer, model_dir, n_envs=16, terminate_on_eos=False),
        policy_kwargs={
            "model_name": str(model_dir),
            "generation_kwargs": SAMPLING,
            "critic": critic,
            "peft": PEFT,
        },
        kl_controller=AdaptiveKLController(0.001, 1.0),
        seed=0,
        device="cpu",
        **SETTINGS,
    )
    rewards = []
    for iteration in range(30):
        algorithm.learn_iteration(iteration, 30)
        rewards.append(algorithm.logger.name_to_value["rollout_info/ep_rew"])
        if rewards[-1] > 0.5:
            break
        assert algorithm.logger.name_to_value["train/ratio_gap"] < 1e-5
    assert rewards[0] < 0.25 and rewards[-1] > 0.5, rewards
