"""Linear layers that multiply in bfloat16, in a model whose other operations stay in float32.

    y = float32(bfloat16(x) bfloat16(W)ᵀ) + b        half the bytes of a weight are read, and the products are faster

    products_in_bfloat16    of a model that generates: its weights are copied for a while, adapters merged into them
    store_in_bfloat16       of a frozen model: its weights are replaced, but for the output layer

Attention, norms, embeddings and logits' log-probs stay in float32, unlike under autocast: on processors, attention in
bfloat16 and a cast of each weight in each step would take longer than float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl4lms_like.policies.faster_layers import ONEDNN_CLASSES, replaced_forwards

LINEAR = (*ONEDNN_CLASSES, *ONEDNN_CLASSES.values())
"""Classes of linear layers; the weight of GPT-2's `Conv1D` is transposed. Quantised layers are of other subclasses."""


@contextmanager
def products_in_bfloat16(model: nn.Module) -> Iterator[None]:
    """Let the linear layers multiply in bfloat16 within the block, with copies of their weights as they are now.

    Needs 2 bytes for each weight. There are no gradients. Layers with adapters of another kind than plain LoRA, such as
    DoRA, stay in float32.
    """
    forwards = {layer: partial(_product, weight.bfloat16(), bias) for layer, weight, bias in _merged_weights(model)}
    with replaced_forwards(forwards):
        yield


def store_in_bfloat16(model: PreTrainedModel) -> None:
    """Replace the weights of a frozen model's linear layers by bfloat16 ones, in place.

    The output layer stays in float32: rounded logits would make errors of hundredths of a nat. Other models that share
    the weights keep them.
    """
    head = model.get_output_embeddings()
    layer: Any
    for layer in list(model.modules()):
        if layer is head or type(layer) not in LINEAR:
            continue
        layer.weight = nn.Parameter(layer.weight.detach().bfloat16(), requires_grad=False)
        layer.__class__ = Bfloat16Linear if isinstance(layer, nn.Linear) else Bfloat16Conv1D


class Bfloat16Linear(nn.Linear):
    """Linear layer with a weight in bfloat16, whose output is float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the output `[..., out]` of `[..., in]`."""
        return _product(self.weight, self.bias, input)


class Bfloat16Conv1D(Conv1D):
    """The same of GPT-2's layer, whose weight is `[in, out]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., out]` of `[..., in]`."""
        return _product(self.weight.T, self.bias, x)


def _product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return x Wᵀ + b in float32, for a weight `[out, in]` in bfloat16."""
    output = F.linear(x.bfloat16(), weight).float()
    return output if bias is None else output + bias


@torch.no_grad()
def _merged_weights(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor, Tensor | None]]:
    """Yield each linear layer, its weight `[out, in]` with its adapter merged into it, and its bias."""
    adapters: set[nn.Module] = set()
    for layer in list(model.modules()):  # a layer comes before its parts
        if layer in adapters:
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


def n_linear_weights(model: PreTrainedModel, *, with_head: bool = False) -> int:
    """Return the number of weights of a model's linear layers and their adapters, by default without its head."""
    head = model.get_output_embeddings()
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in LINEAR]
    return sum(layer.weight.numel() for layer in layers if with_head or layer is not head)
