"""Detection of the linear head that maps hidden states to logits.

Families differ: T5 scales the hidden states, BART adds a bias, Gemma 2 applies soft-capping. No code depends on a
model's name. A probe compares `head(hidden)` with the model's own logits. If no linear head reproduces them, the
model's own forward is used.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4lms_like.core.token_scores import Head

MATCH = 3e-6
"""Largest difference of logits, relative to the largest logit, at which a linear head is accepted."""


def current_head(model: PreTrainedModel, scale: float) -> Head:
    """Return the model's output layer as a `Head` with its current weights."""
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    extra = getattr(model, "final_logits_bias", None)
    if extra is not None:
        extra = extra.reshape(-1)
        bias = extra if bias is None else bias + extra
    return Head(layer.weight, bias, scale)


def linear_head_scale(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> float | None:
    """Return the scale at which `head(hidden)` equals the model's logits.

    Args:
        model: the language model.
        hidden: `[n, d]`, its last hidden states.
        logits: `[n, vocab]`, the logits of its own forward.

    Returns:
        1, `d ** -0.5`, or None if the logits are not such a linear function.
    """
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None:
        return None  # changes large logits only, so the probe would not detect it in an untrained model
    layer = model.get_output_embeddings()
    if layer is None or not isinstance(getattr(layer, "weight", None), Tensor):
        return None
    if hasattr(layer, "base_layer"):
        return None  # an adapter changes the layer; its initial contribution is 0, so the probe would not detect it
    if layer.weight.shape != (logits.shape[-1], hidden.shape[-1]):
        return None
    tolerance = MATCH * float(logits.abs().max().clamp_min(1.0))
    for scale in (1.0, hidden.shape[-1] ** -0.5):
        with torch.no_grad():
            difference = (current_head(model, scale).logits(hidden) - logits).abs().max()
        if float(difference) <= tolerance:
            return scale
    return None
