"""Each algorithm learns the toy reward, on both model families, with either critic."""

import pytest

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.nlpo import NLPO
from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers
from rl4lms_like.rollouts.kl import AdaptiveKLController
from rl4lms_like.testing import models
from tests.builders import MASKABLE, POLICIES, SAMPLING, make_env

SETTINGS = {
    PPO: {"n_steps": 20, "batch_size": 160, "n_epochs": 4, "learning_rate": 3e-3},
    NLPO: {"n_steps": 20, "batch_size": 160, "n_epochs": 4, "learning_rate": 3e-3},
    A2C: {"n_steps": 20, "learning_rate": 5e-3, "use_rms_prop": False, "normalize_advantage": True},
    TRPO: {"n_steps": 40, "n_critic_updates": 2, "target_kl": 1.0, "cg_damping": 0.01, "cg_max_steps": 2},
}
ITERATIONS = {PPO: 25, NLPO: 25, A2C: 40, TRPO: 15}
MASKS = {"mask_type": "learned_top_p", "top_mask": 0.9, "min_tokens_to_keep": 20, "target_update_iterations": 5}


class LowTokensInAll(RewardFunction):
    """The share of tokens with a small id, paid at the end: what counts is the difference between episodes."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return float((current_observation.action_ids < 30).mean()) if done else 0.0


def test_the_reward_rises_with_one_episode_in_each_minibatch(tiny_gpt2_dir, tiny_tokenizer):
    built = PPO(
        POLICIES["causal"],
        make_env(tiny_tokenizer, tiny_gpt2_dir, n_envs=16, terminate_on_eos=False, reward=LowTokensInAll()),
        policy_kwargs={"model_name": str(tiny_gpt2_dir), "generation_kwargs": SAMPLING},
        seed=0,
        device="cpu",
        n_steps=20,
        batch_size=10,
        n_epochs=2,
        learning_rate=2e-3,
        gamma=1.0,
    )
    rewards = []
    while len(rewards) < 15 and not (rewards and rewards[-1] > 0.35):
        built.learn_iteration(len(rewards), 15)
        assert built.logger.name_to_value["train/minibatch_episodes"] == 1
        rewards.append(built.logger.name_to_value["rollout_info/ep_rew"])
    assert rewards[0] < 0.15 and rewards[-1] > 0.35, rewards


@pytest.mark.parametrize(
    ("algorithm", "family", "critic"),
    [
        *((PPO, "causal", "separate"), (PPO, "seq2seq", "shared")),
        *((NLPO, "causal", "shared"), (NLPO, "seq2seq", "separate")),
        *((A2C, "causal", "separate"), (A2C, "seq2seq", "shared")),
        *((TRPO, "causal", "shared"), (TRPO, "seq2seq", "separate")),
    ],
)
def test_the_reward_rises(algorithm, family, critic, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    model_dir = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    built = algorithm(
        (MASKABLE if algorithm is NLPO else POLICIES)[family],
        make_env(tiny_tokenizer, model_dir, n_envs=16, terminate_on_eos=False),
        policy_kwargs={
            "model_name": str(model_dir),
            "generation_kwargs": SAMPLING,
            "critic": critic,
            **(MASKS if algorithm is NLPO else {}),
        },
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


def test_grpo_learns_increasing_numbers(tmp_path):
    tokenizer = models.make_word_tokenizer(map(str, range(10)))
    models.save_model(tmp_path, models.make_causal_lm("gpt2", tokenizer), tokenizer)
    env = make_env(tokenizer, tmp_path, n_envs=64, length=5, terminate_on_eos=False, reward=RewardIncreasingNumbers(5))
    built = GRPO(
        POLICIES["causal"],
        env,
        policy_kwargs={"model_name": str(tmp_path), "generation_kwargs": SAMPLING},
        seed=0,
        device="cpu",
        n_steps=5,
        batch_size=80,
        n_epochs=4,
        learning_rate=3e-3,
    )
    rewards = []
    while len(rewards) < 25 and not (rewards and rewards[-1] > 0.65):
        built.learn_iteration(len(rewards), 25)
        rewards.append(built.logger.name_to_value["rollout_info/ep_rew"])
        assert built.logger.name_to_value["train/ratio_gap"] < 1e-5
    assert rewards[0] < 0.45 and rewards[-1] > 0.65, rewards
