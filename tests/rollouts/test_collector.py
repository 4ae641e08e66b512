"""A rollout has at least the tokens it was asked for, in whole episodes, each with its reward, minus the KL's price."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from rl4lms_like.envs.stepping import make_vec_env
from rl4lms_like.rewards.base import RewardFunction, RewardPart
from rl4lms_like.rewards.combine import CombinedReward
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.collector import RolloutCollector
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.rollouts.rollout import RolloutOptions
from rl4lms_like.system.errors import ModelError, RewardError
from tests.builders import LowTokens, make_env, make_policy
from tests.config_errors import raises_at


class OneAtTheEnd(RewardFunction):
    """One point when the episode is over, however it ended."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        return float(done)


def collect(policy, env, *, n_tokens=60, coeff=0.0, **options):
    collector = RolloutCollector(env, policy, kl=FixedKLController(coeff), options=RolloutOptions(**options), seed=5)
    buffer = EpisodeBuffer(gamma=0.9, gae_lambda=0.8)
    info = collector.collect(buffer, n_tokens)
    return buffer, info, collector


@pytest.fixture(scope="module")
def policy(tiny_gpt2_dir):
    return make_policy("causal", tiny_gpt2_dir)


def test_every_episode_is_whole_and_gets_its_reward(policy, tiny_gpt2_dir, tiny_tokenizer):
    env = make_env(tiny_tokenizer, tiny_gpt2_dir, reward=OneAtTheEnd(), n_envs=5, length=7)
    buffer, info, _ = collect(policy, env, n_tokens=51)
    episodes = buffer.episodes
    assert episodes.n_tokens == info["rollout_info/n_tokens"] == len(buffer.rewards) >= 51
    assert episodes.n_tokens - 5 * 7 < 51, "one generation batch too many"
    assert info["rollout_info/ep_rew"] == 1.0 and info["rollout_info/ep_rew_std"] == 0.0
    per_episode = episodes.pad(torch.from_numpy(buffer.rewards))
    assert torch.equal(per_episode.sum(1), torch.ones(episodes.n_episodes))
    assert torch.equal(per_episode.argmax(1), episodes.lengths - 1)


def test_the_task_reward_minus_the_price_of_the_kl(tiny_gpt2_dir, tiny_tokenizer):
    policy = make_policy("causal", tiny_gpt2_dir)
    with torch.no_grad():
        for parameter in policy.policy_model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    env = make_env(tiny_tokenizer, tiny_gpt2_dir)
    buffer, info, _ = collect(policy, env, coeff=0.3)
    scores = policy.score(buffer.episodes)
    task = 0.1 * (buffer.episodes.actions < 30).float()
    kl = scores.log_prob - scores.ref_log_prob
    assert float(kl.abs().max()) > 0.01
    np.testing.assert_allclose(buffer.rewards, (task - 0.3 * kl).numpy(), atol=1e-5)
    assert info["rollout_info/kl_div_mean"] == pytest.approx(float(kl.mean()), abs=1e-5)
    assert info["rollout_info/kl_coeff"] == 0.3
    totals = buffer.episodes.pad(-0.3 * kl).sum(1)
    assert info["rollout_info/ep_kl_rew"] == pytest.approx(float(totals.mean()), abs=1e-5)


def test_no_reference_no_kl(tiny_gpt2_dir, tiny_tokenizer):
    policy = make_policy("causal", tiny_gpt2_dir, use_reference=False)
    assert policy.ref_model is None
    _, info, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir))
    assert "rollout_info/ep_rew" in info and "rollout_info/kl_div_mean" not in info


def test_normalised_rewards_have_unit_spread_and_are_not_centred(policy, tiny_gpt2_dir, tiny_tokenizer):
    plain, _, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir))
    scaled, _, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir), norm_reward=True)
    assert torch.equal(plain.episodes.actions, scaled.episodes.actions)
    totals = scaled.episodes.pad(torch.from_numpy(scaled.rewards)).sum(1)
    assert float(totals.std()) == pytest.approx(1.0, abs=1e-4)
    assert np.array_equal(plain.rewards == 0, scaled.rewards == 0)


def test_scoring_in_parts_changes_nothing(policy, tiny_gpt2_dir, tiny_tokenizer):
    whole, _, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir))
    parts, _, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir), score_batch_size=20)
    np.testing.assert_allclose(whole.values, parts.values, atol=1e-5)
    np.testing.assert_allclose(whole.returns, parts.returns, atol=1e-5)


def test_a_truncated_episode_can_be_followed_by_the_critics_value(policy, tiny_gpt2_dir, tiny_tokenizer):
    plain, _, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir, length=4))
    followed, _, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir, length=4), bootstrap_truncated=True)
    episodes = plain.episodes
    difference = torch.from_numpy(followed.returns - plain.returns)
    last = episodes.pad(difference)[torch.arange(episodes.n_episodes), episodes.lengths - 1]
    expected = torch.where(episodes.terminated, 0.0, 0.9 * policy.final_values(episodes))
    torch.testing.assert_close(last, expected, atol=1e-6, rtol=1e-5)
    assert (~episodes.terminated).any()


def test_the_value_after_the_end_is_the_one_the_next_token_would_see(policy, tiny_gpt2_dir, tiny_tokenizer):
    buffer, _, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir, terminate_on_eos=False, length=6))
    episodes = buffer.episodes
    shorter = type(episodes)(
        episodes.prompt_ids, episodes.prompt_mask, episodes.response_ids[:, :5], episodes.response_mask[:, :5],
        episodes.terminated,
    )  # fmt: skip
    values = episodes.pad(policy.score(episodes).values)
    torch.testing.assert_close(policy.final_values(shorter), values[:, 5], atol=1e-6, rtol=1e-5)


def test_it_runs_on_stable_baselines3s_own_vectorised_environment(policy, tiny_gpt2_dir, tiny_tokenizer):
    one = make_env(tiny_tokenizer, tiny_gpt2_dir).envs[0]
    env = make_vec_env(
        "dummy", 3, tokenizer=tiny_tokenizer, reward_function=LowTokens(), samples=one.sampler.samples,
        max_episode_length=10, max_prompt_length=14, terminate_on_eos=True, vocab_size=policy.vocab_size,
    )  # fmt: skip
    env.seed(0)
    buffer, info, _ = collect(policy, env, n_tokens=40)
    task = 0.1 * (buffer.episodes.actions < 30).float()
    np.testing.assert_allclose(buffer.rewards, task.numpy(), atol=1e-6)
    assert info["rollout_info/n_tokens"] >= 40


def test_without_end_tokens_every_episode_has_full_length(policy, tiny_gpt2_dir, tiny_tokenizer):
    env = make_env(tiny_tokenizer, tiny_gpt2_dir, terminate_on_eos=False, length=9)
    buffer, info, collector = collect(policy, env, n_tokens=200)
    assert collector.eos_token_ids == []
    assert set(buffer.episodes.lengths.tolist()) == {9} and info["rollout_info/truncated_share"] == 1.0


@pytest.mark.parametrize("where", ["value_head", "policy_model"])
def test_a_diverged_policy_is_named(where, tiny_gpt2_dir, tiny_tokenizer):
    policy = make_policy("causal", tiny_gpt2_dir)
    env = make_env(tiny_tokenizer, tiny_gpt2_dir)
    with torch.no_grad():
        next(getattr(policy, where).parameters()).fill_(float("nan"))
    with pytest.raises(ModelError):
        collect(policy, env)


class Telescope(RewardFunction):
    """Pays differently on the way; the total is 1 for every episode."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        last = 0.1 * len(prev_observation.action_ids)
        return 1 - last if done else 0.1


def test_equal_totals_are_not_divided_by_rounding_noise(policy, tiny_gpt2_dir, tiny_tokenizer):
    env = make_env(tiny_tokenizer, tiny_gpt2_dir, reward=Telescope())
    buffer, _, _ = collect(policy, env, norm_reward=True)
    assert np.abs(buffer.rewards).max() <= 1.0


class TenTimes(VecEnvWrapper):
    """Pays ten times as much."""

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, 10 * rewards, dones, infos


def test_a_wrapper_around_the_environment_is_not_bypassed(policy, tiny_gpt2_dir, tiny_tokenizer):
    buffer, _, _ = collect(policy, TenTimes(make_env(tiny_tokenizer, tiny_gpt2_dir)))
    assert set(np.unique(buffer.rewards)) == {0.0, 1.0}


class Broken(RewardFunction):
    def __init__(self, value):
        self.value = value

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize("value", [float("nan"), None, "much", ZeroDivisionError("boom")])
def test_a_reward_that_fails_is_named_and_nothing_is_put_in_its_place(value, policy, tiny_gpt2_dir, tiny_tokenizer):
    with pytest.raises(RewardError, match="Broken") as error:
        collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir, reward=Broken(value)))
    if isinstance(value, Exception):
        assert error.value.__cause__ is value and "boom" in str(error.value)


def test_the_state_of_a_collector_is_enough_to_go_on(policy, tiny_gpt2_dir, tiny_tokenizer):
    env = make_env(tiny_tokenizer, tiny_gpt2_dir)
    first, _, collector = collect(policy, env)
    state, env_state = collector.state_dict(), env.state_dict()
    second = EpisodeBuffer()
    collector.collect(second, 60)
    other_env = make_env(tiny_tokenizer, tiny_gpt2_dir, seed=99)
    other_env.load_state_dict(env_state)
    other = RolloutCollector(other_env, policy, kl=FixedKLController(9.0), seed=77)
    other.load_state_dict(state)
    again = EpisodeBuffer()
    other.collect(again, 60)
    assert other.kl.coeff == 0.0
    assert torch.equal(second.episodes.actions, again.episodes.actions)
    assert not torch.equal(first.episodes.actions, second.episodes.actions)


@pytest.mark.parametrize("kind", ["text", "dummy"])
def test_the_parts_of_a_reward_are_logged_and_add_up(policy, tiny_gpt2_dir, tiny_tokenizer, kind):
    reward = CombinedReward([RewardPart(LowTokens(), 0.5, "low"), RewardPart(OneAtTheEnd(), -2.0, "end")])
    env: VecEnv = make_env(tiny_tokenizer, tiny_gpt2_dir, reward=reward, length=7, n_envs=4)
    if kind == "dummy":
        env = DummyVecEnv([partial(copy.copy, one) for one in env.envs])
    buffer, info, _ = collect(policy, env, norm_reward=True)
    assert info["rollout_info/reward/end"] == -2.0 and info["rollout_info/reward/end_std"] == 0.0
    low = buffer.episodes.pad((buffer.episodes.actions < 30).float()).sum(1) * 0.1 * 0.5
    assert info["rollout_info/reward/low"] == pytest.approx(float(low.mean()), abs=1e-6)
    assert info["rollout_info/reward/low_std"] == pytest.approx(float(low.std(unbiased=False)), abs=1e-6)
    together = info["rollout_info/reward/low"] + info["rollout_info/reward/end"]
    assert info["rollout_info/ep_rew"] == pytest.approx(together, abs=1e-5)


def test_a_reward_without_parts_logs_none(policy, tiny_gpt2_dir, tiny_tokenizer):
    _, info, _ = collect(policy, make_env(tiny_tokenizer, tiny_gpt2_dir))
    assert not [key for key in info if key.startswith("rollout_info/reward/")]


def test_an_environment_of_a_causal_model_is_refused_for_an_encoder_decoder(tiny_tokenizer, tiny_gpt2_dir, tiny_t5_dir):
    """Its responses would be read as continuations of the prompts."""
    env = make_env(tiny_tokenizer, tiny_gpt2_dir)
    with raises_at("context_start_token"):
        RolloutCollector(env, make_policy("seq2seq", tiny_t5_dir), kl=FixedKLController(0.1))
