"""PPO and A2C take the same steps as Stable-Baselines3's own code on the same rollouts, parameter for parameter."""

import numpy as np
import pytest
import stable_baselines3
import torch
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.policies.speedups import no_speedups
from rl4lms_like.rollouts.kl import AdaptiveKLController
from rl4lms_like.rollouts.text_rollouts import TextRollouts, with_text_rollouts
from tests.builders import POLICIES, SAMPLING, make_env

ITERATIONS = 3
PPO_SETTINGS = {"n_steps": 40, "n_epochs": 3, "batch_size": 64, "ent_coef": 0.01, "learning_rate": 1e-3}
PPO_SETTINGS["normalize_advantage"] = True  # within each minibatch, as Stable-Baselines3
CLIPPED_VALUES = {**PPO_SETTINGS, "clip_range_vf": 0.1, "target_kl": 0.001, "ent_coef": 0.0}
A2C_SETTINGS = {"n_steps": 40, "learning_rate": 1e-3, "gae_lambda": 0.95, "ent_coef": 0.01}
ADAMW = {**A2C_SETTINGS, "use_rms_prop": False, "normalize_advantage": True}
# Stable-Baselines3 clips the gradients of actor and critic together, we only those that meet in a shared trunk.
SHARED = {"max_grad_norm": 0.5, "policy_kwargs": {"critic": "shared"}}
SEPARATE = {"max_grad_norm": 1e6, "policy_kwargs": {"critic": "separate"}}


def trained(algorithm, family, model_dir, tokenizer, *, policy_kwargs=None, **arguments):
    # Without speedups: their rounding is not that of Stable-Baselines3, and Adam makes a step of any tiny gradient.
    plain = {"model_name": str(model_dir), "generation_kwargs": dict(SAMPLING), "speedups": no_speedups()}
    policy_kwargs = {**plain, **(policy_kwargs or {})}
    built = algorithm(
        POLICIES[family],
        make_env(tokenizer, model_dir),
        policy_kwargs=policy_kwargs,
        seed=3,
        device="cpu",
        kl_controller=AdaptiveKLController(0.05, 0.1),
        **arguments,
    )
    for _ in range(ITERATIONS):
        built.learn(1, reset_num_timesteps=built.num_timesteps == 0)
    return built


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (PPO, stable_baselines3.PPO, PPO_SETTINGS | SHARED),
        (PPO, stable_baselines3.PPO, CLIPPED_VALUES | SEPARATE),
        (A2C, stable_baselines3.A2C, A2C_SETTINGS | SEPARATE),
        (A2C, stable_baselines3.A2C, ADAMW | SHARED),
    ],
    ids=["ppo", "ppo-clipped-values-early-stop", "a2c", "a2c-adamw-normalised"],
)
def test_parameters_are_equal_after_three_iterations(
    ours, theirs, settings, family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer
):
    model_dir = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    mine = trained(ours, family, model_dir, tiny_tokenizer, critic_learning_rate=1e-3, **settings)
    stock = trained(with_text_rollouts(theirs), family, model_dir, tiny_tokenizer, **settings)
    start = POLICIES[family].__name__, mine.num_timesteps
    assert stock.num_timesteps == mine.num_timesteps, start
    moved = 0.0
    for (name, a), b in zip(mine.policy.named_parameters(), stock.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        reference = name.replace("policy_model", "ref_model")
        if name.startswith("policy_model"):
            moved = max(moved, float((a - mine.policy.get_parameter(reference)).detach().abs().max()))
    assert moved > 1e-4, "nothing was trained"


class TenLines(OnPolicyAlgorithm):
    """A user's algorithm: REINFORCE with a baseline, in a ten-line train()."""

    def __init__(self, policy, env, learning_rate=3e-3, n_steps=40, **kwargs):
        fixed = {"gae_lambda": 1.0, "gamma": 1.0, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
        super().__init__(policy, env, learning_rate, n_steps, use_sde=False, sde_sample_freq=-1, **fixed, **kwargs)

    def train(self):
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        for batch in self.rollout_buffer.get(160):
            values, log_prob, _ = self.policy.evaluate_actions(batch.observations, batch.actions)
            loss = -(log_prob * batch.advantages).mean() + self.vf_coef * (values - batch.returns).square().mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()


@pytest.mark.parametrize("algorithm", [TenLines, stable_baselines3.PPO], ids=["a user's train()", "stock PPO"])
def test_any_on_policy_algorithm_learns_from_text(algorithm, tiny_gpt2_dir, tiny_tokenizer):
    settings = {} if algorithm is TenLines else {"n_steps": 40, "n_epochs": 4, "batch_size": 160, "learning_rate": 3e-3}
    text = with_text_rollouts(algorithm)
    assert issubclass(text, TextRollouts) and text.__name__ == f"Text{algorithm.__name__}"
    assert with_text_rollouts(text) is text
    model = text(
        POLICIES["causal"],
        make_env(tiny_tokenizer, tiny_gpt2_dir, n_envs=16),
        policy_kwargs={"model_name": str(tiny_gpt2_dir), "generation_kwargs": SAMPLING},
        seed=0,
        device="cpu",
        **settings,
    )
    rewards = []
    for _ in range(12):
        model.learn(1, reset_num_timesteps=not rewards)
        rewards.append(np.mean([info["r"] for info in model.collector.episode_infos]))
    assert rewards[-1] > 2 * rewards[0] and rewards[-1] > 0.3, rewards


def test_stable_baselines3_evaluates_the_policy_step_by_step(tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    from rl4lms_like.envs.env import TextGenEnv

    for family, folder in (("causal", tiny_gpt2_dir), ("seq2seq", tiny_t5_dir)):
        vec = make_env(tiny_tokenizer, folder)
        model = PPO(
            POLICIES[family],
            vec,
            policy_kwargs={"model_name": str(folder)},
            seed=0,
            device="cpu",
            n_steps=4,
            batch_size=4,
        )
        one = vec.envs[0]
        env = DummyVecEnv(
            [
                lambda one=one: TextGenEnv(
                    tiny_tokenizer,
                    one.reward_function,
                    one.sampler.samples,
                    max_episode_length=10,
                    max_prompt_length=14,
                    terminate_on_eos=True,
                    context_start_token=one.layout.context_start_token,
                    vocab_size=int(one.action_space.n),
                )
            ]
        )
        mean, _ = evaluate_policy(model.policy, env, n_eval_episodes=2, deterministic=False, warn=False)
        assert 0 <= mean <= 1.0
