"""Which part of a language model turns hidden states into logits.

Families differ: T5 scales, BART adds a bias, Gemma 2 bends. Nothing here asks for a model's name. A probe compares
`head(hidden)` with the model's own logits; where no linear head explains them, the model's forward is used as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4lms_like.core.token_scores import Head

MATCH = 3e-6
"""Largest difference of logits, relative to the largest, at which a head counts as the model's own."""


def current_head(model: PreTrainedModel, scale: float) -> Head:
    """The model's output layer as a `Head` over its current weights."""
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)
    extra = getattr(model, "final_logits_bias", None)
    if extra is not None:
        extra = extra.reshape(-1)
        bias = extra if bias is None else bias + extra
    return Head(layer.weight, bias, scale)


def linear_head_scale(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> float | None:
    """The scale at which `head(hidden)` gives the model's logits.

    Args:
        model: the language model.
        hidden: `[n, d]`, its last hidden states.
        logits: `[n, vocab]`, what its own forward made of them.

    Returns:
        1, `d ** -0.5`, or None where its logits are no linear function of that kind.
    """
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None:
        return None  # bends large logits only: a probe of a young model would not see it
    layer = model.get_output_embeddings()
    if layer is None or not isinstance(getattr(layer, "weight", None), Tensor):
        return None
    if hasattr(layer, "base_layer"):
        return None  # an adapter adds to it, and adds nothing yet
    if layer.weight.shape != (logits.shape[-1], hidden.shape[-1]):
        return None
    tolerance = MATCH * float(logits.abs().max().clamp_min(1.0))
    for scale in (1.0, hidden.shape[-1] ** -0.5):
        with torch.no_grad():
            difference = (current_head(model, scale).logits(hidden) - logits).abs().max()
        if float(difference) <= tolerance:
            return scale
    return None
