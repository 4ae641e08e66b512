"""Critic-free algorithms: groups, their advantages, their losses under micro-batches, and what the papers ask for."""

import dataclasses
import math

import pytest
import torch
from stable_baselines3.common.vec_env import VecMonitor

from rl4lms_like.algorithms import ALGORITHMS, policy_gradient
from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.policy_gradient import CPGD, DAPO, GRPO, GSPO, MaxRL, OnlineDPO, ReinforcePP
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.config.load import parse_config
from rl4lms_like.config.yaml_file import apply_values
from rl4lms_like.core import losses
from rl4lms_like.core.advantages import whitened
from rl4lms_like.core.objective import action_weights
from rl4lms_like.data_pools.sampler import PromptSampler
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rollouts.kl import AdaptiveKLController, FixedKLController
from rl4lms_like.system.errors import ConfigError, RewardError, RL4LMsLikeError
from tests.algorithms.test_update import build, parameters
from tests.builders import POLICIES, SAMPLING, make_env
from tests.config_errors import raises_at
from tests.configs import run_blocks

IDS = [id for id in ALGORITHMS if ALGORITHMS.entry(id).target.startswith(policy_gradient.__name__)]
IDS.remove("opd")  # needs a teacher: `test_opd`
assert IDS[-1] == "online_dpo", "has no importance weights and no clipping"
SHAPED = {"do_sample": True, "top_k": 0, "temperature": 0.7}
STEPS_OF_TRANSFORMERS = {"speedups": {"fast_decoding": False}}
OTHER_LOG_PROBS = {"speedups": {"sampler_log_probs": False}}
"""For tests that change the log-probs of a rollout, which the first ratio would reveal."""
FIRE = {"first_token_temperature": 10.0, "importance_correction": "tis"}


class Binary(RewardFunction):
    """1 if the last token is even, else 0."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return float(done and action % 2 == 0)


class Constant(RewardFunction):
    """The same for every response."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return float(done)


class OfTheFirstPrompts(RewardFunction):
    """Differs between the responses to short prompts, and is 0 for the others."""

    def __call__(self, prev_observation, action, current_observation, done, meta_info=None) -> float:
        return float(done and len(current_observation.prompt_or_input_text) < 18 and action % 2 == 0)


class Observed(GRPO):
    """Keeps the gradient and what is logged of each step, and takes none."""

    def clip_and_step(self, info):
        self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])
        self.logged = {name: float(value) for name, value in info.items()}


def observing(algorithm):
    return type(f"Observed{algorithm.__name__}", (Observed, algorithm), {"arguments_class": algorithm.arguments_class})


def penalty(algorithm):
    return FixedKLController(0.1, placement=algorithm.arguments_class.kl_placement)


# --- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("id", "family"), [*((id, "causal") for id in IDS[:-1]), ("grpo", "seq2seq")])
def test_micro_batches_never_change_the_gradient_and_the_first_ratio_is_one(
    id, family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer
):
    algorithm = ALGORITHMS.resolve(id)
    size = 1 if id == "reinforce_pp" else 4
    built = build(
        observing(algorithm), tiny_gpt2_dir if family == "causal" else tiny_t5_dir, tiny_tokenizer, family,
        n_envs=16, length=40, n_steps=20, batch_size=None, group_size=size, reward=Binary(),
        kl_controller=penalty(algorithm),         policy_kwargs={"generation_kwargs": SHAPED} | STEPS_OF_TRANSFORMERS,
        ent_coef=0.01, **FIRE,  # its texts have unequal lengths
        **({"clip_range_high": 0.1} if id == "cispo" else {}),
    )  # fmt: skip
    built.learn_iteration(0, 1)
    assert built.logged["ratio_gap"] < 1e-5
    buffer = built.rollout_buffer
    assert len(set(buffer.episodes.lengths.tolist())) > 1, "with equal lengths all means are the same"
    buffer.log_probs.add_(0.3 * torch.randn(buffer.n_tokens, generator=torch.Generator().manual_seed(0)))
    seen = []
    for micro_batch_size in (None, 60, 1):
        built.arguments = dataclasses.replace(built.arguments, micro_batch_size=micro_batch_size)
        built.train()
        seen.append((built.gradient, built.logged))
    assert float(seen[0][0].norm()) > 1e-6
    for found, logged in seen[1:]:
        assert float((found - seen[0][0]).norm() / seen[0][0].norm()) < 1e-5
        assert logged == pytest.approx(seen[0][1], rel=1e-3, abs=1e-5)
    assert 0 < seen[0][1]["clip_fraction"] <= 1


def test_pairs_stay_together(tiny_gpt2_dir, tiny_tokenizer):
    """In micro-batches, and in minibatches that are smaller than a group."""
    built = build(
        observing(OnlineDPO), tiny_gpt2_dir, tiny_tokenizer, n_envs=16, length=40, n_steps=20, group_size=2,
        reward=Binary(), kl_controller=penalty(OnlineDPO), ent_coef=0.01, policy_kwargs=OTHER_LOG_PROBS,
    )  # fmt: skip
    built.learn_iteration(0, 1)
    buffer, n_pairs = built.rollout_buffer, built.logger.name_to_value["train/pairs"]
    groups = buffer.episodes.group_ids
    buffer.log_probs.add_(0.3 * torch.randn(buffer.n_tokens, generator=torch.Generator().manual_seed(0)))
    gradients, logged = [], []
    for micro_batch_size in (None, 60, 1):
        built.arguments = dataclasses.replace(built.arguments, micro_batch_size=micro_batch_size)
        built.train()
        gradients.append(built.gradient)
        logged.append(built.logged)
    assert 1 < n_pairs < len(groups.unique()) and float(gradients[0].norm()) > 1e-4
    for found, values in zip(gradients[1:], logged[1:], strict=True):
        assert float((found - gradients[0]).norm() / gradients[0].norm()) < 1e-5
        assert values == pytest.approx(logged[0], rel=1e-3, abs=1e-5)
    assert logged[0]["minibatch_episodes"] == 2 * n_pairs
    for sort in (False, True):
        buffer.sort_by_length = sort
        assert [len(batch.observations.group_ids.unique()) for batch in buffer.get(1)] == [1] * len(groups.unique())


def test_without_pairs_there_is_no_step(tiny_gpt2_dir, tiny_tokenizer):
    """Rewards that differ by rounding errors are equal."""
    built = build(
        OnlineDPO, tiny_gpt2_dir, tiny_tokenizer, n_envs=8, group_size=4, reward=Binary(), ent_coef=0.1,
        kl_controller=penalty(OnlineDPO),
    )  # fmt: skip
    built.learn_iteration(0, 2)
    before, n_updates = parameters(built), built._n_updates
    assert n_updates
    buffer = built.rollout_buffer
    rewards = 1 + 1e-7 * torch.arange(buffer.n_tokens) % 2e-7
    buffer.rewards[:] = rewards / buffer.episodes.lengths.repeat_interleave(buffer.episodes.lengths)
    built.update_progress = None
    built.train()
    assert torch.equal(parameters(built), before) and built._n_updates == n_updates
    assert built.logger.name_to_value["train/pairs"] == 0
    assert math.isnan(built.logger.name_to_value["ppo/loss"])


def test_the_clip_fraction_of_a_sequence_is_that_of_its_own_ratio(tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        observing(GSPO), tiny_gpt2_dir, tiny_tokenizer, batch_size=None, clip_range=0.2, clip_range_high=0.2,
        policy_kwargs=OTHER_LOG_PROBS,
    )  # fmt: skip
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    signs = torch.ones(buffer.n_tokens)
    for tokens in map(buffer.episodes.token_index, torch.arange(buffer.episodes.n_episodes).split(1)):
        signs[tokens[: len(tokens) // 2 * 2 : 2]] = -1.0
        signs[tokens[len(tokens) // 2 * 2 :]] = 0.0
    buffer.log_probs.add_(signs)  # ratios of e and 1/e, whose geometric mean is 1
    built.train()
    assert built.logged["clip_fraction"] == 0.0


def test_a_first_step_is_the_policy_gradient_for_every_surrogate(tiny_gpt2_dir, tiny_tokenizer):
    """At ratio 1 all surrogates have the gradient of -A log pi, averaged as they say."""
    gradients = {}
    for surrogate in ("clip", "geometric", "cispo", "cpgd"):
        built = build(
            observing(GRPO), tiny_gpt2_dir, tiny_tokenizer, length=20, n_steps=40, batch_size=None, surrogate=surrogate
        )
        built.learn_iteration(0, 1)
        gradients[surrogate] = built.gradient
    for found in gradients.values():
        assert float((found - gradients["clip"]).norm() / gradients["clip"].norm()) < 1e-4


FORMULAS = {
    "clip": ({}, lambda r, a, log_prob: -torch.min(r * a, r.clamp(0.9, 1.3) * a)),
    "dual clip": (
        {"dual_clip": 1.2},
        lambda r, a, log_prob: -torch.where(a < 0, torch.max(r.clamp(min=0.9) * a, 1.2 * a), r.clamp(max=1.3) * a),
    ),
    "cispo": ({"surrogate": "cispo"}, lambda r, a, log_prob: -r.clamp(max=1.3) * a * log_prob),
    "cpgd": (
        {"surrogate": "cpgd", "drift_coef": 0.5},
        lambda r, a, log_prob: -torch.min(r.log() * a, r.clamp(0.9, 1.3).log() * a) + 0.5 * (r - 1 - r.log()),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_loss_of_a_token_has_the_ranges_and_coefficients_of_the_arguments(name, tiny_gpt2_dir, tiny_tokenizer):
    arguments, formula = FORMULAS[name]
    given = arguments if name == "cispo" else {"clip_range": 0.1} | arguments
    built = build(observing(GRPO), tiny_gpt2_dir, tiny_tokenizer, batch_size=None, clip_range_high=0.3, **given)
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    buffer.log_probs.add_(0.5 * torch.randn(buffer.n_tokens, generator=torch.Generator().manual_seed(0)))
    minibatch = next(buffer.get(None))
    log_prob = built.policy.action_scores(minibatch.observations).log_prob
    ratio = (log_prob - minibatch.old_log_prob).exp()
    for sign in (-1, 1):
        of_sign = ratio[minibatch.advantages.sign() == sign]
        assert of_sign.min() < 0.9 and of_sign.max() > 1.3
    torch.testing.assert_close(built.loss(minibatch).policy, formula(ratio, minibatch.advantages, log_prob))


# --- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_a_group_has_one_prompt_and_numbers_of_its_own(algorithm, tiny_gpt2_dir, tiny_tokenizer):
    built = build(algorithm, tiny_gpt2_dir, tiny_tokenizer, group_size=4, n_steps=30)
    built.learn_iteration(0, 1)
    episodes = built.rollout_buffer.episodes
    assert episodes.n_episodes > 8, "several generation batches"
    assert torch.equal(episodes.group_ids, torch.arange(episodes.n_episodes) // 4)
    assert torch.equal(episodes.prompt_rows, episodes.group_ids)
    prompts = [tuple(ids[mask].tolist()) for ids, mask in zip(episodes.prompt_ids, episodes.prompt_mask, strict=True)]
    assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, len(prompts), 4))
    assert len(set(prompts)) > 1
    assert 0 < built.logger.name_to_value["rollout_info/groups_differing_share"] <= 1


def test_a_group_has_one_prompt_if_another_algorithm_has_the_same_environment(tiny_gpt2_dir, tiny_tokenizer):
    built = build(GRPO, tiny_gpt2_dir, tiny_tokenizer, group_size=4)
    policy_kwargs = {"model_name": str(tiny_gpt2_dir), "generation_kwargs": SAMPLING}
    ReinforcePP(POLICIES["causal"], built.env, policy_kwargs=policy_kwargs, device="cpu")
    built.learn_iteration(0, 1)
    episodes = built.rollout_buffer.episodes
    first = episodes.prompt_ids.view(-1, 4, episodes.prompt_ids.shape[1])[:, :1].repeat_interleave(4, dim=1)
    assert torch.equal(first.flatten(0, 1), episodes.prompt_ids) and len(first.unique(dim=0)) > 1


def test_groups_without_differences_are_replaced_and_the_reward_is_that_of_all(tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        DAPO, tiny_gpt2_dir, tiny_tokenizer, group_size=4, n_steps=20, reward=OfTheFirstPrompts(), overlong_buffer=None
    )
    built.learn_iteration(0, 1)
    logged, buffer = built.logger.name_to_value, built.rollout_buffer
    kept = logged["rollout_info/groups_kept_share"]
    assert 0 < kept < 1 and kept == pytest.approx(logged["rollout_info/groups_differing_share"])
    assert buffer.n_tokens >= 20 * 8
    of_kept = sum(info["r"] for info in built.collector.episode_infos) / buffer.episodes.n_episodes
    assert logged["rollout_info/ep_rew"] < of_kept
    assert len(built.collector.episode_infos) == buffer.episodes.n_episodes


def test_a_rollout_without_differences_ends_at_its_limit_and_changes_nothing(tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        DAPO, tiny_gpt2_dir, tiny_tokenizer, group_size=4, reward=Constant(), dynamic_sampling=3, overlong_buffer=None,
        policy_kwargs={"weight_decay": 0.0},
    )  # fmt: skip
    before = parameters(built)
    built.learn_iteration(0, 1)
    logged = built.logger.name_to_value
    assert logged["rollout_info/groups_differing_share"] == logged["rollout_info/groups_kept_share"] == 0.0
    assert logged["rollout_info/ep_rew"] == 1.0
    assert torch.equal(before, parameters(built))


class Recorder(PromptSampler):
    """Keeps what it is told."""

    def update(self, sample_ids, rewards):
        self.ids, self.rewards = sample_ids, rewards
        return {"n": len(sample_ids)}


def test_the_sampler_gets_the_rewards_of_groups_that_are_left_out(tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        DAPO, tiny_gpt2_dir, tiny_tokenizer, group_size=4, reward=Constant(), dynamic_sampling=3, overlong_buffer=None
    )
    sampler = Recorder(built.env.envs[0].sampler.samples, seed=0)
    for env in built.env.envs:
        env.sampler = sampler
    built.learn_iteration(0, 1)
    assert len(sampler.ids) > len(built.collector.episode_infos) and set(sampler.rewards) == {1.0}
    assert built.logger.name_to_value["rollout_info/sampler/n"] == len(sampler.ids)
    assert {sampler.ids.count(id) % 4 for id in sampler.ids} == {0}


def test_groups_are_left_out_before_long_responses_are_penalized(tiny_gpt2_dir, tiny_tokenizer):
    """Equal rewards with different lengths: the penalty makes differences, but not for the choice of groups."""
    arguments = {
        "group_size": 4,
        "reward": Constant(),
        "length": 60,
        "n_steps": 20,
        "n_envs": 16,
        "overlong_buffer": 1.0,
    }
    built = build(DAPO, tiny_gpt2_dir, tiny_tokenizer, dynamic_sampling=3, **arguments)
    built.learn_iteration(0, 1)
    assert built.logger.name_to_value["rollout_info/groups_kept_share"] < 1
    built = build(DAPO, tiny_gpt2_dir, tiny_tokenizer, dynamic_sampling=None, **arguments)
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    lengths, advantages = buffer.episodes.lengths, buffer.episodes.pad(buffer.advantages)[:, 0]
    groups = [(length, paid) for length, paid in zip(lengths.split(4), advantages.split(4), strict=True)]
    shorter = [paid[length.argmin()] - paid[length.argmax()] for length, paid in groups if length.unique().numel() > 1]
    assert shorter and all(difference > 0 for difference in shorter)


def test_the_penalty_grows_over_a_fraction_of_the_longest_response(tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        GRPO, tiny_gpt2_dir, tiny_tokenizer, group_size=4, reward=Constant(), length=60, n_steps=20, n_envs=16,
        scale="none", overlong_buffer=0.75, policy_kwargs={"generation_kwargs": {**SAMPLING, "max_new_tokens": 60}},
    )  # fmt: skip
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    lengths = buffer.episodes.lengths
    assert len(lengths[lengths > 15].unique()) > 1
    penalties = -(lengths - 15).clamp(min=0) / 45
    expected = (penalties.view(-1, 4) - penalties.view(-1, 4).mean(dim=1, keepdim=True)).flatten()
    torch.testing.assert_close(buffer.episodes.pad(buffer.advantages)[:, 0], expected)


def test_rewards_other_than_0_and_1_are_refused_when_they_appear(tiny_gpt2_dir, tiny_tokenizer):
    with pytest.raises(RewardError):
        build(MaxRL, tiny_gpt2_dir, tiny_tokenizer).learn_iteration(0, 1)
    build(MaxRL, tiny_gpt2_dir, tiny_tokenizer, reward=Binary()).learn_iteration(0, 1)


def test_a_return_is_that_of_the_tokens_that_follow(tiny_gpt2_dir, tiny_tokenizer):
    built = build(ReinforcePP, tiny_gpt2_dir, tiny_tokenizer, gamma=0.5, scale="none")
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    first = buffer.episodes.token_index(torch.tensor([0]))
    rewards = torch.as_tensor(buffer.rewards)[first]
    expected = [sum(0.5**k * float(paid) for k, paid in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert buffer.advantages[first].tolist() == pytest.approx(expected, rel=1e-5)


# --- another sampled distribution -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature": 0.7},
        {"top_k": 5, "top_p": 0.8},
        {"min_new_tokens": 5, "min_p": 0.05},
        {"repetition_penalty": 2.0},
        {"typical_p": 0.8, "epsilon_cutoff": 3e-3, "eta_cutoff": 1e-2},
        {"top_k": None},
    ],
)
def test_recorded_log_probs_are_those_of_the_distribution_that_is_sampled(
    family, kwargs, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer
):
    """Compared with the scores that transformers returns; and recording changes no token."""
    folder = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    built = build(GRPO, folder, tiny_tokenizer, family, policy_kwargs=STEPS_OF_TRANSFORMERS)
    generator, model = built.policy.generator, built.policy.policy_model
    generation_kwargs = {"do_sample": True, "top_k": 0, **kwargs}
    prompts, mask = torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.ones(2, 3)
    options = {"eos_token_ids": built.collector.eos_token_ids, "max_new_tokens": 8, "seed": 3}
    plain = generator.generate(prompts, mask, generation_kwargs=generation_kwargs, **options)
    episodes = generator.generate(prompts, mask, generation_kwargs=generation_kwargs, record_log_prob=True, **options)
    assert torch.equal(plain.response_ids, episodes.response_ids) and plain.behavior_log_prob is None
    torch.manual_seed(3)
    returned = model.generate(
        input_ids=prompts, attention_mask=mask.long(), max_new_tokens=8, eos_token_id=built.collector.eos_token_ids,
        output_scores=True, return_dict_in_generate=True, **generation_kwargs,
    )  # fmt: skip
    scores = torch.stack(returned.scores, dim=1).log_softmax(dim=-1)
    width = episodes.response_ids.shape[1]
    expected = scores[:, :width].gather(2, returned.sequences[:, -scores.shape[1] :][:, :width, None]).squeeze(2)
    torch.testing.assert_close(episodes.behavior_log_prob, expected[episodes.response_mask])


def test_the_first_token_has_a_temperature_of_its_own(tiny_gpt2_dir, tiny_tokenizer):
    built = build(GRPO, tiny_gpt2_dir, tiny_tokenizer, first_token_temperature=10.0)
    built.learn_iteration(0, 1)
    episodes = built.rollout_buffer.episodes
    logits = built.policy.action_logits(episodes)
    first = episodes.pad(torch.arange(episodes.n_tokens))[:, 0]
    built.policy.load_state_dict(build(GRPO, tiny_gpt2_dir, tiny_tokenizer).policy.state_dict())
    logits = built.policy.action_logits(episodes)
    expected = logits.log_softmax(-1).gather(1, episodes.actions[:, None]).squeeze(1)
    torch.testing.assert_close(built.rollout_buffer.log_probs, expected, atol=1e-4, rtol=1e-4)
    expected[first] = (logits[first] / 10).log_softmax(-1).gather(1, episodes.actions[first][:, None]).squeeze(1)
    torch.testing.assert_close(episodes.behavior_log_prob, expected, atol=1e-4, rtol=1e-4)
    logged = built.logger.name_to_value
    assert logged["train/ratio_gap"] < 1e-5 and logged["rollout_info/effective_sample_size"] < 1


def test_truncated_support_shows_in_the_mean_weight(tiny_gpt2_dir, tiny_tokenizer):
    """The mean weight of an exact correction is 1; tokens that are never sampled are missing from it."""
    seen = {}
    for top_k in (0, 5):
        kwargs = {"do_sample": True, "top_k": top_k, "temperature": 0.9}
        built = build(
            GRPO, tiny_gpt2_dir, tiny_tokenizer, n_envs=64, n_steps=20, policy_kwargs={"generation_kwargs": kwargs}
        )
        built.learn_iteration(0, 1)
        seen[top_k] = built.logger.name_to_value["rollout_info/importance_weight"]
    assert abs(seen[0] - 1) < 0.05 and seen[5] < 0.8


def test_limited_weights_multiply_those_of_the_mean(tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        observing(GRPO), tiny_gpt2_dir, tiny_tokenizer, length=40, n_steps=40, batch_size=None,
        importance_correction="tis", correction_range=(0.9, 1.05),
        policy_kwargs={"generation_kwargs": {**SHAPED, "max_new_tokens": 40}}, n_envs=16,
    )  # fmt: skip
    built.learn_iteration(0, 1)
    minibatch = next(built.rollout_buffer.get(None))
    weights = (minibatch.old_log_prob - minibatch.observations.behavior_log_prob).exp()
    assert weights.min() < 0.9 and weights.max() > 1.05
    lengths = minibatch.observations.lengths
    assert len(lengths.unique()) > 1
    of_mean = (len(weights) / (len(lengths) * lengths)).repeat_interleave(lengths)
    torch.testing.assert_close(built.prepare_minibatch(minibatch).weights, of_mean * weights.clamp(0.9, 1.05))


def test_rejected_actions_leave_the_mean():
    lengths, kept = torch.tensor([2, 3, 1]), torch.tensor([True, False, True, True, False, False])
    term = torch.tensor([1.0, 9.0, 2.0, 4.0, 9.0, 9.0])
    for aggregation, expected in (
        ("token_mean", 7 / 3),
        ("seq_mean_token_mean", (1.0 + 3.0) / 2),
        ("seq_mean_token_sum_norm", 7 / (2 * 5)),
    ):
        weights = action_weights(lengths, aggregation, norm=5.0, kept=kept)
        assert float((weights * term).mean()) == pytest.approx(expected)
    assert action_weights(lengths, "token_mean", kept=torch.zeros(6).bool()).tolist() == [0.0] * 6


@pytest.mark.parametrize(("correction", "low", "high"), [("icepop", 0.97, 1.03), ("sequence_mask", 0.995, 1.005)])
def test_rejected_actions_have_no_gradient(correction, low, high, tiny_gpt2_dir, tiny_tokenizer):
    built = build(
        observing(GRPO), tiny_gpt2_dir, tiny_tokenizer, batch_size=None, importance_correction=correction,
        correction_range=(low, high), policy_kwargs={"generation_kwargs": SHAPED},
    )  # fmt: skip
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    minibatch = built.prepare_minibatch(next(buffer.get(None)))
    weights = (minibatch.old_log_prob - minibatch.observations.behavior_log_prob).exp()
    kept = minibatch.weights > 0
    assert 0 < int(kept.sum()) < len(kept)
    if correction == "sequence_mask":
        weights = losses.episode_means(weights.log(), minibatch.observations.lengths).exp()
    assert torch.equal(kept, (weights >= low) & (weights <= high))


# --- contradictions -------------------------------------------------------------------------------------------------

WRONG = {
    "group_size": [("grpo", {"group_size": 1}), ("maxrl", {"group_size": 1}), ("reinforce_pp", {"scale": "batch"})],
    "scale": [("grpo", {"baseline": "none"})],
    "dynamic_sampling": [("reinforce_pp", {"dynamic_sampling": 3})],
    "gamma": [("grpo", {"gamma": 0.9})],
    "gae_lambda": [("rloo", {"gae_lambda": 0.9})],
    "overlong_buffer": [("maxrl", {"overlong_buffer": 0.2})],
    "ratio_level": [("cispo", {"ratio_level": "sequence"})],
    "dual_clip": [("gmpo", {"dual_clip": 3.0})],
    "clip_range": [("cispo", {"clip_range": 0.1}), ("cpgd", {"clip_range": 1.5})],
    "correction_range": [
        ("grpo", {"correction_range": [0.5, 2.0]}),
        ("grpo", {"importance_correction": "tis", "correction_range": [2.0, 3.0]}),
    ],
    "vf_coef": [("grpo", {"vf_coef": 0.5})],
    "reference_mixing": [("rloo", {"reference_mixing": 0.5})],
}


@pytest.mark.parametrize(("key", "id", "args"), [(key, *case) for key, cases in WRONG.items() for case in cases])
def test_arguments_that_contradict_each_other_are_refused(key, id, args, tiny_gpt2_dir, tiny_tokenizer):
    blocks = run_blocks()
    blocks["env"]["n_envs"] = 16
    blocks["alg"] |= {"id": id, "args": args, "kl_div": {"coeff": 0.04}}
    with raises_at(f"alg.args.{key}"):
        parse_config(blocks)
    with raises_at(key):
        build(ALGORITHMS.resolve(id), tiny_gpt2_dir, tiny_tokenizer, **args)


@pytest.mark.parametrize(
    ("path", "id", "changes"),
    [
        ("alg.kl_div", "grpo", {"alg.kl_div": {"coeff": 0.1, "estimator": "k1"}}),
        ("alg.kl_div.placement", "ppo", {"alg.kl_div": {"coeff": 0.1, "placement": "loss"}}),
        ("alg.kl_div.placement", "maxrl", {"alg.kl_div": {"coeff": 0.1, "placement": "reward"}}),
        ("alg.kl_div.coeff", "grpo", {"alg.args": {"reference_update_iterations": 2}, "alg.kl_div": {"coeff": 0}}),
        ("alg.args.reference_update_iterations", "grpo", {
            "alg.args": {"reference_update_iterations": 2}, "alg.policy.args.peft": {"r": 2},
        }),
        ("alg.kl_div.norm_reward", "maxrl", {"alg.kl_div": {"coeff": 0.1, "norm_reward": True}}),
        ("alg.kl_div.placement", "online_dpo", {"alg.kl_div.placement": "reward"}),
        ("alg.kl_div.coeff", "online_dpo", {"alg.kl_div.coeff": 0}),
        ("alg.args.scale", "online_dpo", {"alg.args": {"scale": "batch"}}),
        ("alg.args.label_smoothing", "online_dpo", {"alg.args": {"loss": "ipo", "label_smoothing": 0.1}}),
        ("env.n_envs", "grpo", {"env.n_envs": 12}),
        ("env.n_envs", "ppo", {"alg.args": {"group_size": 5}}),
        ("env.vec_env", "grpo", {"env.vec_env": "dummy"}),
        ("alg.policy.args.critic", "grpo", {"alg.policy.args.critic": "shared"}),
        ("alg.args.importance_correction", "dapo", {
            "alg.args": {"importance_correction": "tis"}, "alg.policy.args.generation_kwargs": {"max_new_tokens": 5},
        }),
        ("alg.args.first_token_temperature", "dapo", {
            "alg.args": {"first_token_temperature": 10.0},
            "alg.policy.args.generation_kwargs": {"do_sample": True, "num_beams": 2},
        }),
    ],
)  # fmt: skip
def test_settings_of_other_blocks_that_contradict_are_refused(path, id, changes):
    blocks = run_blocks()
    blocks["env"]["n_envs"] = 16
    blocks["alg"] |= {"id": id, "args": {}, "kl_div": {"coeff": 0.04}}
    parse_config(blocks)
    blocks, issues = apply_values(blocks, changes, "test")
    with raises_at(path):
        parse_config(blocks, issues=issues)


def test_in_python_they_are_refused_too(tiny_gpt2_dir, tiny_tokenizer):
    with pytest.raises(ConfigError):
        build(GRPO, tiny_gpt2_dir, tiny_tokenizer, n_envs=6)
    with raises_at("kl_controller.coeff"):
        build(GRPO, tiny_gpt2_dir, tiny_tokenizer, reference_update_iterations=1)
    with raises_at("kl_controller.placement"):
        build(PPO, tiny_gpt2_dir, tiny_tokenizer, kl_controller=FixedKLController(0.1, placement="loss"))
    with pytest.raises(ValueError, match="k1"):
        FixedKLController(0.1, estimator="k1", placement="loss")
    built = build(GRPO, tiny_gpt2_dir, tiny_tokenizer)
    built.set_env(VecMonitor(make_env(tiny_tokenizer, tiny_gpt2_dir)))
    with pytest.raises(RL4LMsLikeError):
        built.learn(1)


@pytest.mark.parametrize(("id", "placement", "estimator"), [
    ("grpo", "loss", "k3"), ("reinforce_pp_baseline", "loss", "k2"), ("rloo", "reward", "k1"), ("ppo", "reward", "k1"),
])  # fmt: skip
def test_placement_and_estimator_have_the_defaults_of_the_algorithm(id, placement, estimator):
    blocks = run_blocks()
    blocks["env"]["n_envs"] = 16
    blocks["alg"] |= {"id": id, "args": {}, "kl_div": {"coeff": 0.04}}
    kl = parse_config(blocks).alg.kl_div
    assert (kl.placement, kl.estimator) == (placement, estimator)


def test_the_penalty_in_the_loss_is_not_in_the_reward(tiny_gpt2_dir, tiny_tokenizer):
    built = build(CPGD, tiny_gpt2_dir, tiny_tokenizer, kl_controller=FixedKLController(0.1, placement="loss"))
    with torch.no_grad():
        for parameter in built.policy.ref_model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    built.learn_iteration(0, 1)
    logged = built.logger.name_to_value
    assert logged["ppo/kl_loss"] > 0 and logged["rollout_info/ep_kl_rew"] == 0
    assert built.rollout_buffer.kl.abs().max() > 0
    torch.testing.assert_close(
        torch.as_tensor(built.rollout_buffer.rewards.sum()),
        torch.tensor(sum(info["r"] for info in built.collector.episode_infos), dtype=torch.float32),
    )


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_logged_coefficient_is_that_of_the_penalty(placement, tiny_gpt2_dir, tiny_tokenizer):
    """The rewards have that of the rollout, the loss that after the controller's step."""
    controller = AdaptiveKLController(0.1, 0.5, placement=placement)
    built = build(observing(GRPO), tiny_gpt2_dir, tiny_tokenizer, batch_size=None, kl_controller=controller)
    built.learn_iteration(0, 1)
    assert controller.coeff < 0.1
    expected = 0.1 if placement == "reward" else controller.coeff
    assert built.logger.name_to_value["rollout_info/kl_coeff"] == expected


def test_whitened_rounding_errors_are_zero():
    mask = torch.ones(7).bool()
    assert torch.full((7,), 1000.1).mean() != torch.tensor(1000.1), "so that the mean has a rounding error"
    assert whitened(torch.full((7,), 1000.1), mask).tolist() == [0.0] * 7
    assert whitened(torch.tensor([1000.1] * 6 + [1000.2]), mask).abs().min() > 0.1
    assert whitened(torch.tensor([1.0] * 6 + [math.nan]), mask).isnan().all()


def test_a_notice_says_that_excluded_tokens_leave_a_bias():
    blocks = run_blocks()
    blocks["env"]["n_envs"] = 16
    blocks["alg"] |= {"id": "grpo", "args": {"importance_correction": "tis"}, "kl_div": {"coeff": 0.04}}
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["temperature"] = 0.7
    places = [notice.path for notice in parse_config(blocks).notices]
    assert "alg.args.importance_correction" not in places
    blocks["alg"]["policy"]["args"]["generation_kwargs"]["top_k"] = 5
    assert "alg.args.importance_correction" in [notice.path for notice in parse_config(blocks).notices]


@pytest.mark.parametrize("algorithm", [GRPO, PPO, A2C, TRPO])
def test_the_reference_is_fixed_or_follows_the_policy(algorithm, tiny_gpt2_dir, tiny_tokenizer):
    for interval, mixing in ((None, None), (2, 0.25), (1, 1.0)):
        arguments = {"reference_update_iterations": interval} | ({} if mixing is None else {"reference_mixing": mixing})
        built = build(algorithm, tiny_gpt2_dir, tiny_tokenizer, kl_controller=FixedKLController(0.1), **arguments)

        def weights(model):
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        start = weights(built.policy.ref_model)
        built.learn_iteration(0, 2)
        if interval == 1:
            assert torch.equal(weights(built.policy.ref_model), weights(built.policy.policy_model))
            continue
        assert torch.equal(weights(built.policy.ref_model), start)
        built.learn_iteration(1, 2)
        moved = 0.0 if interval is None else mixing
        expected = start.lerp(weights(built.policy.policy_model), moved)
        torch.testing.assert_close(weights(built.policy.ref_model), expected)
