"""The mask model: refreshed in place, frozen, saved and found again."""

import pytest
import torch

from rl4lms_like.policies.masked import own_special_tokens
from rl4lms_like.system.errors import ModelError
from rl4lms_like.testing import models
from tests.builders import MASKABLE, make_policy
from tests.config_errors import raises_at
from tests.policies.test_masking import maskable, moved, written


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_a_refresh_reaches_the_sampler_and_nothing_else_does(model, tiny_gpt2_dir, tiny_t5_dir):
    """The masks follow the mask model, and the mask model follows the policy only when it is told to (D-02)."""
    policy = maskable(tiny_gpt2_dir if model == "gpt2" else tiny_t5_dir)

    def masks():
        # Of the first step only: nothing in them depends yet on what the policy writes.
        episodes = written(policy, generation_kwargs={"do_sample": True, "top_k": 0}, max_new_tokens=1)
        return episodes.allowed

    before = masks()
    moved(policy)
    assert torch.equal(masks(), before)
    holder = policy.mask_model
    policy.update_mask_model()
    assert policy.mask_model is holder and policy.generator.mask_model is holder
    assert torch.equal(weights(policy.mask_model), weights(policy.policy_model))
    assert not torch.equal(masks(), before)
    moved(policy)
    assert not torch.equal(weights(policy.mask_model), weights(policy.policy_model)), "weights of its own"


def test_a_moving_average_keeps_its_share(tiny_gpt2_dir):
    policy = maskable(tiny_gpt2_dir, mask_ema=0.75)
    start = weights(policy.mask_model)
    moved(policy)
    expected = start
    for _ in range(3):
        policy.update_mask_model()
        expected = 0.75 * expected + 0.25 * weights(policy.policy_model)
    torch.testing.assert_close(weights(policy.mask_model), expected, atol=1e-7, rtol=1e-6)


def test_the_mask_model_is_frozen_and_part_of_the_state(tiny_gpt2_dir):
    policy = maskable(tiny_gpt2_dir)
    assert not any(weight.requires_grad for weight in policy.mask_model.parameters())
    trained = {id(weight) for group in policy.optimizer.param_groups for weight in group["params"]}
    assert not trained & {id(weight) for weight in policy.mask_model.parameters()}
    assert any(name.startswith("mask_model.") for name in policy.state_dict())
    policy.set_training_mode(True)
    assert not policy.mask_model.training
    other = maskable(tiny_gpt2_dir)
    moved(policy)
    policy.update_mask_model()
    other.load_state_dict(policy.state_dict())
    assert torch.equal(weights(other.generator.mask_model), weights(policy.mask_model))


def test_dropout_in_updates_leaves_the_mask_model_alone(tiny_gpt2_dir):
    policy = maskable(tiny_gpt2_dir, dropout=True)
    policy.set_training_mode(True)
    assert policy.policy_model.training and not policy.mask_model.training
    assert torch.equal(written(policy).allowed, written(policy).allowed)


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_the_mask_model_is_saved_and_found_again(model, tiny_gpt2_dir, tiny_t5_dir, tmp_path, tiny_tokenizer):
    """A policy goes on with the mask model that it had, not with a new copy of itself (D-06)."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    policy = maskable(tiny_gpt2_dir if model == "gpt2" else tiny_t5_dir)
    moved(policy)
    folder = policy.save_model(tmp_path / model, tiny_tokenizer)
    again = maskable(folder)
    assert torch.equal(weights(again.policy_model), weights(policy.policy_model))
    assert torch.equal(weights(again.mask_model), weights(policy.mask_model))
    assert not torch.equal(weights(again.mask_model), weights(again.policy_model))
    assert not any(weight.requires_grad for weight in again.mask_model.parameters())
    auto_class = AutoModelForCausalLM if model == "gpt2" else AutoModelForSeq2SeqLM
    plain = auto_class.from_pretrained(folder / "mask_model")
    assert torch.equal(weights(plain), weights(policy.mask_model))


def test_a_mask_model_of_other_tokens_is_refused(tiny_gpt2_dir, tmp_path, tiny_tokenizer):
    folder = make_policy("causal", tiny_gpt2_dir).save_model(tmp_path / "model", tiny_tokenizer)
    other = models.make_causal_lm("gpt2", tiny_tokenizer)
    other.resize_token_embeddings(400)
    other.save_pretrained(folder / "mask_model")
    with pytest.raises(ModelError):
        maskable(folder)


def test_without_a_tokenizers_ids_the_models_own_special_tokens_are_allowed(tiny_gpt2_dir):
    policy = maskable(tiny_gpt2_dir, special_token_ids=None)
    assert policy.generator.rule.special_token_ids == tuple(own_special_tokens(policy.policy_model)) == (0, 1)
    assert maskable(tiny_gpt2_dir, special_token_ids=[5, 999]).generator.rule.special_token_ids == (5,)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"mask_type": "learned_top_p", "top_mask": -1}, "top_mask"),
        ({"mask_type": "learned_top_p", "top_mask": 50}, "top_mask"),
        ({"mask_type": "learned_top_k", "top_mask": 0.9}, "top_mask"),
        ({"mask_type": "topk", "top_mask": 0}, "top_mask"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs.num_beams"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_model_is_loaded(arguments, path):
    with raises_at(path):
        make_policy_args = {"model_name": "no-such-model", "top_mask": 0.5, "mask_type": "learned_top_p", **arguments}
        MASKABLE["causal"](None, None, None, **make_policy_args)


def test_with_adapters_the_mask_model_is_a_plain_model_that_takes_them_over(tiny_gpt2_dir, tmp_path, tiny_tokenizer):
    pytest.importorskip("peft")
    policy = maskable(tiny_gpt2_dir, peft={"r": 2, "target_modules": ["c_attn"]}, mask_ema=0.5, merge_on_save=True)
    assert all("lora" not in name for name, _ in policy.mask_model.named_parameters())
    start = weights(policy.mask_model)
    frozen = [weight.clone() for weight in policy.policy_model.parameters() if not weight.requires_grad]
    with torch.no_grad():
        for name, weight in policy.policy_model.named_parameters():
            if "lora" in name:
                weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    policy.update_mask_model()
    from rl4lms_like.policies.lora import merged

    expected = 0.5 * start + 0.5 * weights(merged(policy.policy_model))
    torch.testing.assert_close(weights(policy.mask_model), expected, atol=1e-6, rtol=1e-6)
    assert float((weights(policy.mask_model) - start).abs().max()) > 0.1
    unchanged = [weight for weight in policy.policy_model.parameters() if not weight.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(frozen, unchanged, strict=True)), "what is shared stays as it is"
    folder = policy.save_model(tmp_path / "adapters", tiny_tokenizer)
    assert torch.equal(weights(maskable(folder).mask_model), weights(policy.mask_model))
