"""Log-probs and entropies of the sampling in place of the policy's pass over a rollout: the same numbers, checked."""

import dataclasses

import pytest
import torch
from stable_baselines3 import PPO as SB3PPO

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.policy_gradient import DAPO, GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.policies.speedups import PATH
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.algorithms.test_update import build
from tests.builders import MASKABLE, POLICIES, SAMPLING, make_env

EXACT = 1e-5
FAMILIES = {"gpt2": "causal", "llama": "causal", "qwen2": "causal", "gemma2": "causal", "t5": "seq2seq"}
LEARNING_RATE = 1e-3


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, tiny_tokenizer):
    """Family and folder of a random model far from uniform."""
    is_causal = FAMILIES[request.param] == "causal"
    make = models.make_causal_lm if is_causal else models.make_seq2seq_lm
    model = make(request.param, tiny_tokenizer, scale=5.0 if is_causal else 1.0)
    return FAMILIES[request.param], models.save_model(tmp_path_factory.mktemp(request.param), model, tiny_tokenizer)


def pair(algorithm, folder, tokenizer, family="causal", policy_kwargs=None, **arguments):
    """Two algorithms that differ in the speedup only: with, without."""
    built = []
    for is_on in (True, False):
        policy_kwargs = {**(policy_kwargs or {}), "speedups": {"sampler_log_probs": is_on}}
        made = build(algorithm, folder, tokenizer, family, policy_kwargs=policy_kwargs, **arguments)
        assert made.collector.uses_sampler_log_probs == is_on
        built.append(made)
    return built


def penalty(placement="reward"):
    return FixedKLController(0.1, placement=placement)


def rollouts(built):
    """Collect a rollout with each algorithm; return their buffers."""
    for made in built:
        made.rollout_buffer.reset()
        made.logged = made.collector.collect(made.rollout_buffer, 20)
    return [made.rollout_buffer for made in built]


def gradient_of(made):
    """The gradient of the first minibatch, a whole rollout, without a step."""
    gradients = []

    def keep(logged):
        gradients.append(torch.cat([p.grad.flatten() for p in made.policy.parameters() if p.grad is not None]))

    made.clip_and_step = keep
    made.learn_iteration(0, 1)
    return gradients[0]


@pytest.mark.parametrize("grouped", [False, True], ids=["ppo", "groups"])
def test_scores_and_gradients_are_those_of_a_pass(family, grouped, tiny_tokenizer):
    kind, folder = family
    algorithm, options = PPO, {"n_epochs": 1, "batch_size": 10_000, "kl_controller": penalty()}
    if grouped:
        # In the rewards, the rounding of a first KL of 0 would be all that differs in groups with equal rewards.
        options = {"group_size": 4, "n_episodes": 16, "minibatch_episodes": 16, "n_epochs": 1, "micro_batch_size": 60}
        options["kl_controller"] = penalty("loss")
        algorithm = GRPO
    built = pair(algorithm, folder, tiny_tokenizer, kind, ent_coef=0.01, **options)
    sampled, scored = (gradient_of(made) for made in built)

    with_it, without = (made.rollout_buffer for made in built)
    assert torch.equal(with_it.episodes.response_ids, without.episodes.response_ids), "the same random numbers"
    assert not torch.equal(with_it.log_probs, without.log_probs), "equal bits would be those of the same pass"
    torch.testing.assert_close(with_it.log_probs, without.log_probs, atol=EXACT, rtol=EXACT)
    assert float((sampled - scored).norm()) <= 1e-4 * float(scored.norm())
    for key, value in built[1].logger.name_to_value.items():
        if key.startswith("rollout_info/"):
            assert built[0].logger.name_to_value[key] == pytest.approx(value, abs=1e-4, rel=1e-4), key
    assert built[0].logger.name_to_value.keys() == built[1].logger.name_to_value.keys()


def test_weights_after_an_update_differ_by_less_than_a_hundredth_of_a_step(family, tiny_tokenizer):
    kind, folder = family
    built = pair(PPO, folder, tiny_tokenizer, kind, kl_controller=penalty(), learning_rate=LEARNING_RATE)
    moved = []
    for made in built:
        made.learn_iteration(0, 1)
        moved.append(torch.cat([p.detach().flatten() for p in made.policy.parameters()]))
    # Adam turns rounding errors of a gradient near 0 into steps, so the largest difference says nothing.
    assert float((moved[0] - moved[1]).square().mean().sqrt()) <= 0.01 * LEARNING_RATE


def test_the_policy_makes_no_pass_over_a_rollout(tiny_gpt2_dir, tiny_tokenizer):
    built = pair(PPO, tiny_gpt2_dir, tiny_tokenizer, kl_controller=penalty())
    n_passes = {}
    for made in built:
        for role in ("reader", "value_reader", "ref_reader"):
            reader = getattr(made.policy, role)
            states, name = reader.states, (made.collector.uses_sampler_log_probs, role)
            n_passes[name] = 0

            def counted(episodes, states=states, name=name):
                n_passes[name] += 1
                return states(episodes)

            reader.states = counted
    rollouts(built)
    n_batches = n_passes[False, "reader"]
    assert n_batches > 0
    assert n_passes[True, "reader"] == 0
    assert n_passes[True, "value_reader"] == n_passes[True, "ref_reader"] == n_batches


def test_stop_strings_and_several_batches(tiny_gpt2_dir, tiny_tokenizer):
    sampling = {**SAMPLING, "stop_strings": ["a", "e"]}
    built = pair(
        GRPO, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs={"generation_kwargs": sampling}, group_size=2, n_episodes=32
    )
    for made in built:
        made.collector.traits = dataclasses.replace(made.collector.traits, tokenizer=tiny_tokenizer)
    with_it, without = rollouts(built)
    lengths = without.episodes.lengths
    assert torch.equal(with_it.episodes.lengths, lengths) and len(lengths.unique()) > 2
    torch.testing.assert_close(with_it.log_probs, without.log_probs, atol=EXACT, rtol=EXACT)


def test_groups_that_are_left_out_take_their_log_probs_with_them(tiny_gpt2_dir, tiny_tokenizer):
    built = pair(DAPO, tiny_gpt2_dir, tiny_tokenizer, group_size=4, n_episodes=16, n_envs=16, dynamic_sampling=3)
    for made in built:
        batches = made.collector.generation_batch
        made.collector.generation_batch = lambda batches=batches: without_variance(batches())
    with_it, without = rollouts(built)
    assert with_it.episodes.n_episodes == 16
    torch.testing.assert_close(with_it.log_probs, without.log_probs, atol=EXACT, rtol=EXACT)


def without_variance(batch):
    """The batch with equal rewards in its second group."""
    rewards = batch.rewards.clone()
    rewards[batch.episodes.token_index(torch.arange(4, 8))] = 0.0
    return dataclasses.replace(batch, rewards=rewards)


def test_only_a_correction_keeps_the_log_probs_in_the_episodes(tiny_gpt2_dir, tiny_tokenizer):
    plain, _ = rollouts(pair(PPO, tiny_gpt2_dir, tiny_tokenizer))
    assert plain.episodes.behavior_log_prob is None and plain.episodes.behavior_entropy is None

    built = pair(PPO, tiny_gpt2_dir, tiny_tokenizer, importance_correction="tis")
    corrected, _ = rollouts(built)
    assert corrected.episodes.behavior_entropy is None
    assert torch.equal(corrected.episodes.behavior_log_prob, torch.as_tensor(corrected.log_probs))
    assert built[0].logged["rollout_info/importance_weight"] == 1.0


def test_adapters_and_a_trust_region(tiny_gpt2_dir, tiny_tokenizer):
    adapters = {"peft": {"r": 4, "target_modules": ["c_attn"], "init_lora_weights": True}}
    for algorithm, policy_kwargs in ((GRPO, adapters), (TRPO, {"attn_implementation": "eager"})):
        options = {"group_size": 4} if algorithm is GRPO else {}
        built = pair(algorithm, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=policy_kwargs, **options)
        for made in built:
            made.learn_iteration(0, 2)
            made.learn_iteration(1, 2)  # with other weights than at the start
            assert float(made.logger.name_to_value["train/ratio_gap"]) < 1e-4
        with_it, without = (made.rollout_buffer for made in built)
        torch.testing.assert_close(with_it.log_probs, without.log_probs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "arguments"),
    [(PPO, {}), (A2C, {}), (GRPO, {"group_size": 4}), (TRPO, {"policy_kwargs": {"attn_implementation": "eager"}})],
)
def test_a_sampler_of_another_distribution_is_found_before_the_first_step(
    algorithm, arguments, tiny_gpt2_dir, tiny_tokenizer
):
    built = build(algorithm, tiny_gpt2_dir, tiny_tokenizer, **arguments)
    before = torch.cat([p.detach().flatten() for p in built.policy.parameters()])
    generate = built.policy.generator.generate
    hotter = {**SAMPLING, "temperature": 0.7}
    built.policy.generator.generate = lambda *args, **options: generate(
        *args, **{**options, "generation_kwargs": hotter}
    )
    with pytest.raises(ModelError, match=f"{PATH}.sampler_log_probs: false"):
        built.learn_iteration(0, 1)
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in built.policy.parameters()]))


class OwnScores(POLICIES["causal"]):
    """A user's policy, with another distribution than the one that is sampled."""

    def evaluate_actions(self, observations, actions=None):
        values, log_prob, entropy = super().evaluate_actions(observations, actions)
        return values, log_prob - 1, entropy


@pytest.mark.parametrize(
    ("algorithm", "policy_kwargs", "arguments"),
    [
        (PPO, {"generation_kwargs": {**SAMPLING, "temperature": 0.9}}, {}),
        (PPO, {"generation_kwargs": {"do_sample": True}}, {}),  # transformers' top_k of 50
        (PPO, {"generation_kwargs": {**SAMPLING, "top_p": 0.9}}, {}),
        (PPO, {"generation_kwargs": {**SAMPLING, "min_new_tokens": 2}}, {}),
        (PPO, {"generation_kwargs": {"do_sample": False}}, {}),
        (PPO, {"critic": "shared"}, {}),
        (PPO, {"dtype": "bfloat16"}, {}),
        (PPO, {"dropout": True}, {}),
        (PPO, {"speedups": {"sampler_log_probs": False}}, {}),
        (GRPO, {}, {"first_token_temperature": 1.5, "group_size": 4}),
        (with_text_rollouts(SB3PPO), {}, {"batch_size": 64}),
    ],
)
def test_it_is_off_where_the_numbers_would_be_others_or_are_not_checked(
    algorithm, policy_kwargs, arguments, tiny_gpt2_dir, tiny_tokenizer
):
    assert build(PPO, tiny_gpt2_dir, tiny_tokenizer).collector.uses_sampler_log_probs
    built = build(algorithm, tiny_gpt2_dir, tiny_tokenizer, policy_kwargs=policy_kwargs, **arguments)
    assert not built.collector.uses_sampler_log_probs
    built.rollout_buffer.reset()
    built.collector.collect(built.rollout_buffer, 20)
    assert built.rollout_buffer.episodes.behavior_entropy is None


def test_it_is_off_with_masks_and_for_a_policy_that_scores_itself(tiny_gpt2_dir, tiny_tokenizer):
    masked = {"model_name": str(tiny_gpt2_dir), "generation_kwargs": SAMPLING, "top_mask": 20, "mask_type": "topk"}
    env = make_env(tiny_tokenizer, tiny_gpt2_dir)
    built = PPO(MASKABLE["causal"], env, n_steps=20, policy_kwargs=masked, device="cpu")
    assert not built.collector.uses_sampler_log_probs
    own = {"model_name": str(tiny_gpt2_dir), "generation_kwargs": SAMPLING}
    assert not PPO(OwnScores, env, n_steps=20, policy_kwargs=own, device="cpu").collector.uses_sampler_log_probs
