"""Techniques of actor-critics: each does what its paper says, and splitting or resuming never changes a number."""

import dataclasses

import pytest
import torch

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.arguments import CriticPretraining, PPOArguments, SAOArguments, VAPOArguments
from rl4lms_like.algorithms.critic_pretraining import CriticPretrainer
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.sao import SAO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.algorithms.vapo import VAPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.settings import check_settings
from rl4lms_like.core.advantages import length_adaptive_lambda
from rl4lms_like.core.losses import clipped_surrogate
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.kl import make_kl_controller
from rl4lms_like.system.errors import ConfigError, ModelError
from rl4lms_like.testing import models
from tests.algorithms.test_update import build, parameters
from tests.builders import episodes_of_lengths
from tests.configs import run_blocks

SGD = {"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}}


class Growing(RewardFunction):
    """A reward of the last token, from 0 to 1, that differs between episodes."""

    def __call__(self, current_observation, action, next_observation, done, meta_info=None):
        return len(set(next_observation.context_text)) / 10 if done else 0.0


class OfThePrompt(RewardFunction):
    """A reward of the last token that depends on the prompt only, so that a critic can learn it."""

    def __call__(self, current_observation, action, next_observation, done, meta_info=None):
        return len(next_observation.prompt_or_input_text) % 5 / 5 if done else 0.0


def actor(built):
    return torch.cat([p.detach().flatten() for p in built.policy.policy_model.parameters()])


def critic(built):
    own = [*built.policy.value_model.parameters(), *built.policy.value_head.parameters()]
    return torch.cat([p.detach().flatten() for p in own])


def after(n, algorithm, model_dir, tokenizer, **arguments):
    """Build and train for `n` of 10 iterations."""
    built = build(algorithm, model_dir, tokenizer, reward=Growing(), **arguments)
    for iteration in range(n):
        built.learn_iteration(iteration, 10)
    return built


# --- lambdas ----------------------------------------------------------------------------------------------------------


def filled(episodes, rewards, values, **options):
    buffer = EpisodeBuffer(gamma=0.9, **options)
    buffer.add(episodes, rewards, values, torch.zeros_like(rewards))
    buffer.compute_returns_and_advantage()
    return buffer


def test_the_critics_targets_have_their_own_lambda():
    episodes = episodes_of_lengths([3, 1, 8])
    given = (episodes, torch.randn(episodes.n_tokens), torch.randn(episodes.n_tokens))
    both = filled(*given, gae_lambda=0.7, value_gae_lambda=1.0)
    low, high = filled(*given, gae_lambda=0.7), filled(*given, gae_lambda=1.0)
    assert torch.equal(both.advantages, low.advantages)
    assert (both.returns == high.returns).all() and not (both.returns == low.returns).all()
    discounted = []  # sums of the rewards that follow, without any value
    for rewards in given[1].split(episodes.lengths.tolist()):
        powers = 0.9 ** torch.arange(len(rewards))
        discounted += [(rewards[t:] * powers[: len(rewards) - t]).sum() for t in range(len(rewards))]
    torch.testing.assert_close(torch.as_tensor(both.returns), torch.stack(discounted))


def test_lambda_adapts_to_the_length_of_each_episode():
    episodes = episodes_of_lengths([3, 1, 8, 20])
    given = (episodes, torch.randn(episodes.n_tokens), torch.randn(episodes.n_tokens))
    adaptive = filled(*given, gae_lambda=1.0, gae_length_alpha=0.5)
    for index, length in enumerate(episodes.lengths.tolist()):
        tokens = episodes.token_index(torch.tensor([index]))
        alone = filled(*given, gae_lambda=max(0.0, 1 - 1 / (0.5 * length)))
        torch.testing.assert_close(adaptive.advantages[tokens], alone.advantages[tokens])
    assert (adaptive.returns == filled(*given, gae_lambda=1.0).returns).all()
    assert length_adaptive_lambda(torch.tensor([1, 20]), 0.05).tolist() == [0.0, 0.0]


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.25, 2.0, 4.0])
@pytest.mark.parametrize("advantage", [-1.0, 2.0])
def test_the_clipped_surrogate_has_separate_ranges_and_a_second_clip(ratio, advantage):
    r = torch.tensor([ratio])
    loss = clipped_surrogate(r.log(), torch.tensor([advantage]), 0.2, 0.28, 3.0)
    gain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    gain = max(gain, 3.0 * advantage) if advantage < 0 else gain
    assert float(loss) == pytest.approx(-gain)


@pytest.mark.parametrize(
    "arguments",
    [
        {"nll_coef": 0.5, "nll_threshold": 0.6},
        {"ratio_band": (0.999, 1.001)},
        {"dual_clip": 1.001, "clip_range_high": 0.3, "clip_range": 1e-4},
        {"critic_epochs": 3},
        {"critic_epochs": 1},
    ],
)
def test_micro_batches_change_no_technique(arguments, tiny_gpt2_dir, tiny_tokenizer):
    weights = []
    for micro_batch_size in (None, 30, 1):
        built = after(
            1, PPO, tiny_gpt2_dir, tiny_tokenizer, micro_batch_size=micro_batch_size, learning_rate=0.3,
            policy_kwargs=SGD, **arguments,
        )  # fmt: skip
        weights.append(parameters(built))
    moved = float((weights[0] - parameters(build(PPO, tiny_gpt2_dir, tiny_tokenizer))).norm())
    plain = parameters(after(1, PPO, tiny_gpt2_dir, tiny_tokenizer, learning_rate=0.3, policy_kwargs=SGD))
    assert float((weights[0] - plain).norm()) > 1e-3 * moved, "the technique has an effect on this rollout"
    for other in weights[1:]:
        assert float((weights[0] - other).norm()) < 1e-4 * moved


def test_the_likelihood_is_that_of_good_episodes_only(deeper_gpt2_dir, tiny_tokenizer):
    built = after(1, PPO, deeper_gpt2_dir, tiny_tokenizer, n_epochs=1, nll_coef=0.5, nll_threshold=0.6)
    minibatch = built.prepare_minibatch(next(built.rollout_buffer.get(None)))
    good = minibatch.episode_rewards >= 0.6
    assert 0 < int(good.sum()) < len(good)
    objective = built.loss(minibatch)
    log_prob = built.policy.action_scores(minibatch.observations).log_prob
    assert float(objective.nll.mean()) == pytest.approx(float(-log_prob[good].mean()), rel=1e-5)


def test_actions_outside_the_band_leave_the_mean(tiny_gpt2_dir, tiny_tokenizer):
    built = after(1, PPO, tiny_gpt2_dir, tiny_tokenizer, ratio_band=(0.99, 1.01), learning_rate=1e-2)
    minibatch = built.prepare_minibatch(next(built.rollout_buffer.get(None)))
    objective = built.loss(minibatch)
    ratio = objective.log_ratio.exp()
    kept = (ratio >= 0.99) & (ratio <= 1.01)
    assert 0 < int(kept.sum()) < len(kept)
    expected = -(ratio * minibatch.advantages)[kept].mean()
    assert float(objective.policy.mean()) == pytest.approx(float(expected), rel=1e-4)
    built.arguments = dataclasses.replace(built.arguments, micro_batch_size=30)
    minibatch = built.prepare_minibatch(next(built.rollout_buffer.get(None)))
    parts = [each.policy for _, each in built.micro_losses(minibatch, 30)]
    assert len(parts) > 1
    assert float(torch.cat(parts).mean()) == pytest.approx(float(expected), rel=1e-4)


# --- which steps train what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PPO, A2C, TRPO])
def test_the_first_iterations_train_only_the_critic(algorithm, tiny_gpt2_dir, tiny_tokenizer):
    start = build(algorithm, tiny_gpt2_dir, tiny_tokenizer)
    one = after(1, algorithm, tiny_gpt2_dir, tiny_tokenizer, critic_only_iterations=1)
    assert torch.equal(actor(one), actor(start)) and not torch.equal(critic(one), critic(start))
    one.learn_iteration(1, 10)
    assert not torch.equal(actor(one), actor(start))


@pytest.mark.parametrize(("critic_epochs", "steps"), [(1, (1, 2)), (3, (3, 2))])
def test_the_critic_has_its_own_number_of_passes(critic_epochs, steps, tiny_gpt2_dir, tiny_tokenizer):
    """Actor and critic have separate weights, so each equals that of a run with as many passes of both."""
    both = after(1, PPO, tiny_gpt2_dir, tiny_tokenizer, n_epochs=2, critic_epochs=critic_epochs)
    of_critic, of_actor = (after(1, PPO, tiny_gpt2_dir, tiny_tokenizer, n_epochs=n) for n in steps)
    torch.testing.assert_close(actor(both), actor(of_actor), rtol=0, atol=0)
    torch.testing.assert_close(critic(both), critic(of_critic), rtol=0, atol=1e-7)


def test_a_frozen_part_of_the_critic_never_changes(tiny_gpt2_dir, tiny_tokenizer):
    def named(built):
        return {name: p.detach().clone() for name, p in built.policy.value_model.named_parameters()}

    built = build(SAO, tiny_gpt2_dir, tiny_tokenizer, critic_only_iterations=0, n_epochs=1)
    before = named(built)
    built.learn_iteration(0, 1)
    changed = {name for name, value in named(built).items() if not torch.equal(value, before[name])}
    assert changed and not any("attn" in name for name in changed)
    assert {name for name in before if "mlp" in name} <= changed
    with pytest.raises(ModelError, match="nowhere"):
        build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"critic_frozen": ["nowhere"]})


def test_the_critic_may_be_another_model_of_the_same_tokenizer(tmp_path, tiny_gpt2_dir, tiny_tokenizer):
    other = models.make_causal_lm("llama", tiny_tokenizer, hidden_size=16)
    other.resize_token_embeddings(len(tiny_tokenizer) + 24)  # padded, as published models often are
    folder = models.save_model(tmp_path / "critic", other, tiny_tokenizer)
    built = after(1, PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"critic_model": str(folder)})
    assert built.policy.value_head.in_features == 16
    assert float(torch.as_tensor(built.rollout_buffer.values).abs().max()) == 0.0
    blocks = run_blocks()
    blocks["tokenizer"]["model_name"] = str(tiny_gpt2_dir)
    blocks["alg"]["policy"]["args"] |= {"model_name": str(tiny_gpt2_dir), "critic_model": str(folder)}
    check_settings(parse_config(blocks))


# --- pretraining -----------------------------------------------------------------------------------------------------


def test_pretraining_explains_the_returns_and_leaves_the_policy_alone(tmp_path, tiny_gpt2_dir, tiny_tokenizer):
    adaptive = make_kl_controller(0.1, target_kl=0.1)
    pretrain = {"max_rollouts": 4, "patience": 4, "n_epochs": 6, "learning_rate": 3e-3}
    built = build(
        PPO,
        tiny_gpt2_dir,
        tiny_tokenizer,
        reward=OfThePrompt(),
        n_envs=32,
        gamma=1.0,
        critic_pretrain=pretrain,
        kl_controller=adaptive,
    )
    start, optimizer, coeff = actor(built), built.policy.optimizer, adaptive.coeff
    for _ in built.pretrain_critic():
        pass
    explained = built.pretraining.explained
    assert torch.equal(actor(built), start)
    assert len(explained) == 4 and explained[0] == pytest.approx(0.0, abs=1e-6) and explained[-1] > 0.5
    assert built.num_timesteps == 0 and adaptive.coeff == coeff
    assert not any(p in optimizer.state for p in built.policy.policy_model.parameters())
    folder = built.policy.save_critic(tmp_path / "critic")
    other = build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"critic_model": str(folder)})
    episodes = after(1, PPO, tiny_gpt2_dir, tiny_tokenizer).rollout_buffer.episodes
    with torch.no_grad():
        torch.testing.assert_close(other.policy.predict_values(episodes), built.policy.predict_values(episodes))


def test_pretraining_ends_when_the_explained_variance_settles():
    pretraining = CriticPretrainer(CriticPretraining(max_rollouts=9, patience=2, min_gain=0.05))
    ended = []
    for value in (0.0, 0.3, 0.32, 0.6, 0.61, 0.64, 0.9):
        pretraining.explained.append(value)
        ended.append(pretraining.is_over)
    assert ended == [False, False, False, False, False, True, False]


def test_learn_pretrains_before_its_first_rollout(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, reward=Growing(), critic_pretrain={"max_rollouts": 2})
    built.learn(total_timesteps=10)
    assert len(built.pretraining.explained) == 2
    assert float(torch.as_tensor(built.rollout_buffer.values).abs().max()) > 0


def test_a_loaded_algorithm_does_not_pretrain_again(tmp_path, tiny_gpt2_dir, tiny_tokenizer):
    arguments = {"gae_length_alpha": 1.0, "critic_pretrain": {"max_rollouts": 2}}
    built = build(VAPO, tiny_gpt2_dir, tiny_tokenizer, reward=Growing(), **arguments)
    built.learn(total_timesteps=10)
    built.save(tmp_path / "saved.zip")
    loaded = VAPO.load(tmp_path / "saved.zip", env=built.env)
    loaded.learn(total_timesteps=10)
    assert loaded.pretraining.explained == built.pretraining.explained
    assert loaded.arguments.critic_pretrain.max_rollouts == 2


# --- presets and contradictions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "arguments"), [(VAPO, VAPOArguments), (SAO, SAOArguments)])
def test_a_preset_is_ppo_with_its_arguments_written_out(preset, arguments, tiny_gpt2_dir, tiny_tokenizer):
    own = {
        "critic_only_iterations": 0,
        "n_steps": 20,
        "batch_size": 80,
        "learning_rate": 1e-3,
        "seed": 1,
        "device": "cpu",
    }
    made = arguments(**own)
    written = {field.name: getattr(made, field.name) for field in dataclasses.fields(PPOArguments)}
    written["critic_learning_rate"] = arguments.CRITIC_FACTOR * 1e-3
    frozen = {"critic_frozen": ["attn"]} if preset is SAO else {}
    first = after(1, preset, tiny_gpt2_dir, tiny_tokenizer, n_epochs=made.n_epochs, critic_only_iterations=0)
    second = after(1, PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=frozen, **written)
    assert torch.equal(parameters(first), parameters(second))


@pytest.mark.parametrize(
    ("arguments", "policy", "path"),
    [
        ({"ratio_band": (1.1, 2.0)}, {}, "ratio_band"),
        ({"ratio_band": (0.5, 2.0), "dual_clip": 3.0}, {}, "dual_clip"),
        ({"nll_threshold": 0.5}, {}, "nll_threshold"),
        ({"critic_pretrain": {}}, {"critic": "shared"}, "critic_pretrain"),
        ({}, {"critic": "shared", "critic_frozen": ["attn"]}, "critic_frozen"),
        ({}, {"critic_frozen": ["("]}, "critic_frozen.0"),
    ],
)
def test_contradictions_are_refused(arguments, policy, path, tiny_gpt2_dir, tiny_tokenizer):
    with pytest.raises(ConfigError) as caught:
        build(PPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=policy, **arguments)
    assert [issue.path for issue in caught.value.issues] == [path]
