"""Linear layers that multiply in bfloat16, in a model whose other operations stay in float32.

    y = float32(bfloat16(x) bfloat16(W)ᵀ) + b

`store_in_bfloat16` replaces the weights of a frozen model, but for the output layer. A model that generates has copies
instead, see `generating_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl4lms_like.policies.faster_layers import ONEDNN_CLASSES

LINEAR = (*ONEDNN_CLASSES, *ONEDNN_CLASSES.values())
"""Classes of linear layers; the weight of GPT-2's `Conv1D` is transposed. Quantised layers are of other subclasses."""


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
        return product_in_bfloat16(self.weight, self.bias, input)


class Bfloat16Conv1D(Conv1D):
    """The same of GPT-2's layer, whose weight is `[in, out]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., out]` of `[..., in]`."""
        return product_in_bfloat16(self.weight.T, self.bias, x)


def product_in_bfloat16(
    weight: Tensor, bias: Tensor | None, x: Tensor, *, multiply: Callable[[Tensor, Tensor], Tensor] = F.linear
) -> Tensor:
    """Return x Wᵀ + b in float32, for a weight `[out, in]` in bfloat16 that `multiply` reads."""
    output = multiply(x.bfloat16(), weight).float()
    return output if bias is None else output + bias


def n_linear_weights(model: PreTrainedModel, *, with_head: bool = False) -> int:
    """Return the number of weights of a model's linear layers and their adapters, by default without its head."""
    head = model.get_output_embeddings()
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in LINEAR]
    return sum(layer.weight.numel() for layer in layers if with_head or layer is not head)
