"""Weights that several processes split: what each network gets, and copies of whole models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from rl4lms_like.policies.lora import add_lora, copy_sharing_frozen
from rl4lms_like.policies.sharding import plain_copy, separate_frozen_weights


@pytest.fixture
def adapted(tiny_gpt2_dir):
    """A GPT-2, whose output layer is tied to its embedding, with adapters."""
    pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    add_lora(model, {"r": 2}, dropout=False)
    return model


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_copy_has_the_values_of_all_weights(family, tiny_gpt2_dir, tiny_t5_dir):
    auto_class, folder = {
        "gpt2": (AutoModelForCausalLM, tiny_gpt2_dir),
        "t5": (AutoModelForSeq2SeqLM, tiny_t5_dir),
    }[family]
    model = auto_class.from_pretrained(folder)
    copied = plain_copy(model).state_dict()
    assert copied.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(copied[name], tensor), name  # fails for a tensor on `meta`


def test_a_copy_that_would_lack_weights_is_an_error(adapted):
    """The layers of a model with adapters have other names; theirs would stay on `meta`, without values."""
    with pytest.raises(RuntimeError, match=r"c_attn\.weight"):
        plain_copy(adapted)


def test_a_copy_of_a_model_that_has_lost_a_weight_is_an_error(tiny_gpt2_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    model.transformer.ln_f.bias = None
    with pytest.raises(RuntimeError, match=r"ln_f\.bias"):
        plain_copy(model)


def test_networks_that_are_split_have_frozen_weights_of_their_own(adapted):
    """A weight is moved to a device in place, which must not move those of a network that is split later."""
    reference = copy_sharing_frozen(adapted)
    before = dict(reference.named_parameters(remove_duplicate=False))
    separate_frozen_weights(adapted)

    for name, weight in adapted.named_parameters(remove_duplicate=False):
        assert not weight.requires_grad or "lora_" in name
        if not weight.requires_grad:
            assert weight is not before[name] and weight.data_ptr() == before[name].data_ptr()
    assert adapted.lm_head.weight is adapted.transformer.wte.weight
