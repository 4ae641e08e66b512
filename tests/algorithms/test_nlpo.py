"""NLPO: PPO over the tokens that a lagging copy of the policy allows, exact from rollout to update."""

import dataclasses

import pytest
import torch

from rl4lms_like.algorithms.nlpo import NLPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.core.token_masks import contains
from rl4lms_like.rollouts.kl import FixedKLController
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.builders import MASKABLE, POLICIES, SAMPLING, make_env

TOP_P = {"mask_type": "learned_top_p", "top_mask": 0.6, "min_tokens_to_keep": 2, "target_update_iterations": 2}
FAMILIES = [("causal", "gpt2"), ("causal", "llama"), ("seq2seq", "t5"), ("seq2seq", "bart")]


def build(model_dir, tokenizer, family="causal", algorithm=NLPO, masks=TOP_P, policy_kwargs=None, **arguments):
    defaults = {"n_steps": 10, "batch_size": 40, "n_epochs": 1, "learning_rate": 1e-2, "seed": 1, "device": "cpu"}
    own = {"model_name": str(model_dir), "generation_kwargs": SAMPLING, **(policy_kwargs or {})}
    return algorithm(
        (MASKABLE if algorithm is NLPO else POLICIES)[family],
        make_env(tokenizer, model_dir, n_envs=8),
        policy_kwargs={**own, **masks} if algorithm is NLPO else own,
        kl_controller=FixedKLController(0.1),
        **{**defaults, **arguments},
    )


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def trained(algorithm):
    return torch.cat([weight.detach().flatten() for weight in algorithm.policy.parameters() if weight.requires_grad])


def logged(algorithm):
    return algorithm.logger.name_to_value


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_the_first_ratio_is_one_before_and_after_each_refresh(family, name, tmp_path, tiny_tokenizer):
    make = models.make_causal_lm if family == "causal" else models.make_seq2seq_lm
    model = make(name, tiny_tokenizer, scale=1.0 if name == "t5" else 5.0)
    built = build(models.save_model(tmp_path / name, model, tiny_tokenizer), tiny_tokenizer, family)
    refreshed = []
    for iteration in range(5):
        built.learn_iteration(iteration, 5)
        assert logged(built)["train/ratio_gap"] < 1e-5, iteration
        assert logged(built)["ppo/approx_kl"] > 1e-4, "updates that move something"
        episodes = built.rollout_buffer.episodes
        assert bool(contains(episodes.allowed, episodes.actions).all())
        refreshed.append(torch.equal(weights(built.policy.mask_model), weights(built.policy.policy_model)))
    assert refreshed == [False, True, False, True, False], "after every second update, and strictly after it"
    assert logged(built)["nlpo/mask_updates"] == 2


def test_a_forgotten_mask_shows_in_the_first_ratio(tiny_gpt2_dir, tiny_tokenizer):
    """The check above can fail: updates that ignore the masks are far from the rollout's log-probs."""
    built = build(tiny_gpt2_dir, tiny_tokenizer)
    built.learn_iteration(0, 1)
    buffer = built.rollout_buffer
    everything = buffer.samples(torch.arange(buffer.episodes.n_episodes))
    with torch.no_grad():
        scores = built.policy.score(dataclasses.replace(everything.observations, allowed=None))
    assert float((scores.log_prob - everything.old_log_prob).exp().sub(1).abs().mean()) > 0.1


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_where_nothing_is_masked_it_is_ppo(family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    model_dir = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    everything = {**TOP_P, "top_mask": 1.0}
    kwargs = {"policy_kwargs": {"generation_kwargs": {"do_sample": True, "top_k": 20, "min_new_tokens": 2}}}
    runs = [build(model_dir, tiny_tokenizer, family, algorithm, everything, **kwargs) for algorithm in (PPO, NLPO)]
    for run in runs:
        torch.manual_seed(0)
        run.policy.value_head.reset_parameters()
        for iteration in range(2):
            run.learn_iteration(iteration, 2)
    assert torch.equal(*(run.rollout_buffer.episodes.actions for run in runs))
    assert torch.equal(*(trained(run) for run in runs)), "to the bit"


@pytest.mark.parametrize("family", ["causal", "seq2seq"])
def test_micro_batches_never_change_the_masked_gradient(family, tiny_gpt2_dir, tiny_t5_dir, tiny_tokenizer):
    model_dir = tiny_gpt2_dir if family == "causal" else tiny_t5_dir
    gradients = []
    for micro_batch_size in (None, 30, 1):
        built = build(
            model_dir, tiny_tokenizer, family, micro_batch_size=micro_batch_size, ent_coef=0.01, batch_size=80,
            learning_rate=1e-3, policy_kwargs={"optimizer_class": torch.optim.SGD, "optimizer_kwargs": {}},
        )  # fmt: skip
        torch.manual_seed(0)
        built.policy.value_head.reset_parameters()
        before = trained(built)
        built.learn_iteration(0, 1)
        gradients.append((trained(built) - before) / 1e-3)
    assert float(gradients[0].norm()) > 1e-3
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, atol=2e-3 * float(gradients[0].norm()), rtol=1e-3)


def test_the_price_is_of_the_whole_distributions_and_the_ratio_of_the_masked_ones(tiny_gpt2_dir, tiny_tokenizer):
    built = build(tiny_gpt2_dir, tiny_tokenizer, n_epochs=1, learning_rate=1e-9)
    built.learn_iteration(0, 2)
    numbers = logged(built)
    # Policy and reference are still the same model: no KL, whatever the masks exclude.
    assert abs(numbers["rollout_info/kl_div_mean"]) < 1e-5 and abs(numbers["rollout_info/ep_kl_rew"]) < 1e-5
    assert numbers["rollout_info/log_prob"] > numbers["rollout_info/raw_log_prob"] + 0.1
    assert numbers["rollout_info/raw_log_prob"] == pytest.approx(numbers["rollout_info/ref_log_prob"], abs=1e-5)
    assert 2 <= numbers["rollout_info/n_allowed"] < 320
    scores = built.policy.score(built.rollout_buffer.episodes)
    torch.testing.assert_close(built.rollout_buffer.log_probs, scores.log_prob, atol=1e-5, rtol=1e-5)


def test_the_tokenizers_special_tokens_are_always_allowed(tiny_gpt2_dir, tiny_tokenizer):
    built = build(tiny_gpt2_dir, tiny_tokenizer, masks={**TOP_P, "mask_type": "learned_top_k", "top_mask": 1})
    built.learn_iteration(0, 1)
    allowed = built.rollout_buffer.episodes.allowed
    assert built.policy.generator.rule.special_token_ids == tuple(sorted(tiny_tokenizer.all_special_ids))
    for token in tiny_tokenizer.all_special_ids:
        assert bool(contains(allowed, torch.full((len(allowed),), token)).all())


def test_it_needs_a_maskable_policy(tiny_gpt2_dir, tiny_tokenizer):
    with pytest.raises(ModelError, match="MaskableCausalLMActorCriticPolicy"):
        NLPO(POLICIES["causal"], make_env(tiny_tokenizer, tiny_gpt2_dir))


def test_stable_baselines3_saves_the_mask_model_and_the_count(tiny_gpt2_dir, tiny_tokenizer, tmp_path):
    built = build(tiny_gpt2_dir, tiny_tokenizer)
    for iteration in range(3):
        built.learn_iteration(iteration, 3)
    built.save(tmp_path / "saved.zip")
    again = NLPO.load(tmp_path / "saved.zip", env=make_env(tiny_tokenizer, tiny_gpt2_dir), device="cpu")
    assert again.n_iterations == 3
    assert torch.equal(weights(again.policy.mask_model), weights(built.policy.mask_model))
    assert not torch.equal(weights(again.policy.mask_model), weights(again.policy.policy_model))
    again.learn(1)
    assert torch.equal(weights(again.policy.mask_model), weights(again.policy.policy_model)), "the fourth is due"
    alone = NLPO.load(tmp_path / "saved.zip", device="cpu")  # no environment, which knows the special tokens
    assert torch.equal(weights(alone.policy.mask_model), weights(built.policy.mask_model))
