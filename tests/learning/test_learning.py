"""Each algorithm learns the toy reward, on both model families, with either critic."""

import pytest

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.rollouts.kl import AdaptiveKLController
from tests.builders import POLICIES, SAMPLING, make_env

SETTINGS = {
    PPO: {"n_steps": 20, "batch_size": 160, "n_epochs": 4, "learning_rate": 3e-3},
    A2C: {"n_steps": 20, "learning_rate": 5e-3, "use_rms_prop": False, "normalize_advantage": True},
}
ITERATIONS = {PPO: 25, A2C: 40}


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("family", ["causal", "seq2seq"])
@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_reward_rises(algorithm, family, critic, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    model_dir = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    built = algorithm(
        POLICIES[family],
        make_env(tiny_tokenizer, model_dir, n_envs=16, terminate_on_eos=False),
        policy_kwargs={"model_name": str(model_dir), "generation_kwargs": SAMPLING, "critic": critic},
        kl_controller=AdaptiveKLController(0.001, 1.0),
        seed=0,
        device="cpu",
        **SETTINGS[algorithm],
    )
    rewards = []
    for iteration in range(ITERATIONS[algorithm]):
        built.learn_iteration(iteration, ITERATIONS[algorithm])
        rewards.append(built.logger.name_to_value["rollout_info/ep_rew"])
        if rewards[-1] > 0.6:
            break
        assert built.logger.name_to_value["train/ratio_gap"] < 1e-5
    assert rewards[0] < 0.25 and rewards[-1] > 0.6, rewards
