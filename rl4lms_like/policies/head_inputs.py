"""Hidden states that a language model's output layer reads, from the model's own forward pass without its logits.

    model.forward   ids ──layers──> states [n, length, d] ──output layer──> logits [n, length, vocab]
    here            ids ──layers──> states [n, length, d]                   logits [n, 0, vocab]

Everything before the output layer is that of the model's `forward`, also what a trainer has wrapped around it
(autocast) or hooked into it (noise on embeddings). The states are those after T5's scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4lms_like.policies.teacher_forcing import linear_head_scale


@contextmanager
def without_logits(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Let a model's forward passes compute no logits within the block, and collect the states of each pass.

    Args:
        model: the language model, not compiled: a compiled one would ignore the hook.

    Yields:
        A list to which each forward pass adds the input of the output layer, `[n, length, d]`.
    """
    states: list[Tensor] = []

    def collect(_layer: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        (hidden,) = inputs
        states.append(hidden)
        return hidden[:, :0]

    hook = model.get_output_embeddings().register_forward_pre_hook(collect)
    try:
        yield states
    finally:
        hook.remove()


@torch.no_grad()
def has_linear_head(model: PreTrainedModel) -> bool:
    """Return whether a model's logits are the product of its output layer with the layer's input, plus its bias.

    Tested on a few tokens, without dropout. It is False for a model that scales or caps its logits, and for one with
    adapters of the output layer.
    """
    if model.get_output_embeddings() is None:
        return False

    ids = torch.arange(6, device=model.device).view(2, 3)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids

    # Kernels of flash attention have no float32, in which the weights are. Logits do not depend on the kernel.
    attention = model.config._attn_implementation
    is_flash = "flash" in str(attention)
    if is_flash:
        model.set_attn_implementation("sdpa")

    was_training = model.training
    model.eval()
    logits = model(**inputs).logits  # [2, 3, vocab]
    with without_logits(model) as states:
        model(**inputs)
    model.train(was_training)
    if is_flash:
        model.set_attn_implementation(attention)
    return linear_head_scale(model, states[0].flatten(0, 1), logits.flatten(0, 1)) == 1.0
