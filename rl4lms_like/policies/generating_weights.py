"""Copies of the weights of linear layers with which a model generates faster.

They are made for each batch, or once for all turns of a batch of dialogues, and then dropped.

    bfloat16   y = float32(bfloat16(x) bfloat16(W)ᵀ) + b     half the bytes are read, and the products are faster
    packed     the numbers in the order in which oneDNN's kernel reads them (`core.products`), in float32 or bfloat16

W has the layer's adapter merged into it. The copies hold the weights as they are now, and no optimizer makes a step
before the batch is complete, so none of them can be stale.
Attention, norms, embeddings and the log-probs of logits stay in float32, unlike under autocast: on processors,
attention in bfloat16 and a cast of each weight in each step would take longer than float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl4lms_like.core.products import is_worth_packing, packed, product_with_packed, why_mkl
from rl4lms_like.policies.low_precision import LINEAR, product_in_bfloat16
from rl4lms_like.policies.speedups import Speedups

Forwards = dict[Any, Callable[[Tensor], Tensor]]
"""Layer -> function in place of its forward pass, for `replaced_forwards`."""

MIN_STEPS = 8
"""Tokens of a response from which packing takes less time than it saves."""


def can_pack(speedups: Speedups) -> bool:
    """Return whether a model on this machine's processor generates with packed weights."""
    return speedups.packed_weights and why_mkl() is None


def forwards_to_generate(
    model: PreTrainedModel, *, in_bfloat16: bool, packs: bool, merged: Mapping[Any, Tensor] | None = None
) -> Forwards:
    """Return functions that compute the outputs of linear layers with copies of their weights, without gradients.

    Needs 2 or 4 bytes for each weight. Layers with adapters of another kind than plain LoRA, such as DoRA, are not
    changed.

    Args:
        model: a language model.
        in_bfloat16: multiply in bfloat16.
        packs: pack the weights that are large enough, of the layers that compute every token.
        merged: layer with an adapter -> weight `[out, in]` with the adapter merged into it, where that is known.
    """
    # A layer that reads the prompts once would be packed for a single product.
    repeated = _repeated_layers(model) if packs else set()
    forwards: Forwards = {}
    for layer, weight, bias in _merged_weights(model, merged or {}):
        is_packed = layer in repeated and is_worth_packing(weight)

        # The bias is added in float32, after a product in bfloat16.
        if in_bfloat16:
            weight = weight.bfloat16()
            multiply = product_with_packed if is_packed else functional.linear
            forwards[layer] = partial(
                product_in_bfloat16, packed(weight) if is_packed else weight, bias, multiply=multiply
            )
            continue

        # In float32, a plain weight needs no copy.
        if is_packed:
            forwards[layer] = partial(product_with_packed, weight=packed(weight), bias=bias)
    return forwards


def n_packed_weights(model: PreTrainedModel) -> int:
    """Return the number of weights that are packed, for estimates."""
    # Factors of adapters are linear layers too, but are merged into the weights that are packed.
    factors: set[nn.Module] = set()
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            factors |= {*layer.lora_A.modules(), *layer.lora_B.modules()}  # type: ignore[union-attr]
    layers: list[Any] = [layer for layer in _repeated_layers(model) - factors if type(layer) in LINEAR]
    return sum(layer.weight.numel() for layer in layers if is_worth_packing(layer.weight))


def _repeated_layers(model: PreTrainedModel) -> set[nn.Module]:
    """Return the modules that compute every token. An encoder, and the vision of a model, read the prompts once."""
    return {*model.get_decoder().modules(), model.get_output_embeddings()}


@torch.no_grad()
def _merged_weights(
    model: nn.Module, merged: Mapping[Any, Tensor]
) -> Iterator[tuple[nn.Module, Tensor, Tensor | None]]:
    """Yield each linear layer, its weight `[out, in]` with its adapter merged into it, and its bias."""
    adapters: set[nn.Module] = set()
    for layer in list(model.modules()):  # a layer comes before its parts
        if layer in adapters:
            continue
        if layer in merged:
            adapters |= set(layer.modules())
            yield layer, merged[layer], layer.get_base_layer().bias  # type: ignore[operator]
            continue

        # With an adapter, W + s B A is that of the layer around the base.
        base: Any = layer
        delta: Tensor | None = None
        if hasattr(layer, "lora_A"):
            adapters |= set(layer.modules())
            wrapped: Any = layer
            base = wrapped.get_base_layer()
            if wrapped.lora_variant or len(wrapped.active_adapters) != 1:
                continue
            if type(base) in LINEAR:
                delta = wrapped.get_delta_weight(wrapped.active_adapters[0])
        if type(base) in LINEAR:
            weight = base.weight.detach() if delta is None else base.weight + delta
            yield layer, weight.T.contiguous() if isinstance(base, Conv1D) else weight, base.bias
