"""Weights that several processes split: what each network gets."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from rl4lms_like.policies.lora import add_lora, copy_sharing_frozen
from rl4lms_like.policies.sharding import separate_frozen_weights


@pytest.fixture
def adapted(tiny_gpt2_dir):
    """A GPT-2, whose output layer is tied to its embedding, with adapters."""
    pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2_dir)
    add_lora(model, {"r": 2}, dropout=False)
    return model


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
