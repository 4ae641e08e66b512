"""Low-rank adapters that are merged into one weight for a forward pass, which then costs one product for each layer.

    PEFT       y = x Wᵀ + s (x Aᵀ) Bᵀ + b          three products
    merged     y = x Mᵀ + b,  M = W + s B A        one; M is computed once for all passes with the same adapters

    backward   dx = g M        dB = s gᵀ (x Aᵀ)        dA = s (g B)ᵀ x        g: gradient of y

M is a copy: the frozen weight W stays as it is, because reference and critic share it. Before each pass, the adapters
are compared with those of the last merge in all of their numbers, so it does not matter what has changed them: an
optimizer (fused ones leave torch's version counter as it is), a checkpoint, an average, or a search along a line. On a
GPU, which finishes its work before it answers, passes with gradients are compared only after an optimizer step. As a
check of this, some log-probs are compared with PEFT's every `CHECK_EVERY` iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl4lms_like.policies.faster_layers import replaced_forwards
from rl4lms_like.system.errors import import_extra

NAME = "default"
"""PEFT's default adapter name."""
CHECK_EVERY = 10
"""Iterations from one comparison with separate adapters to the next one."""
N_COMPARED = 4
"""Responses that are compared, at most; those of the first prompt."""
TOLERANCE = 0.01
"""Largest difference of log-probs that can be rounding, in nats; in float32 it is about 1e-5."""

_n_steps = 0
"""Steps of all optimizers of the process so far; a fused one leaves no other sign of a change."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function that computes x Wᵀ + b of x, W and b, such as `torch.nn.functional.linear`."""


class MergedAdapters:
    """Merged weights of a model with adapters.

    Layers of other kinds than `mergeable_layers` remain those of PEFT.

    Args:
        model: a model with adapters; outside of `in_use`, it is not changed.
        product: computes the products with merged weights.
    """

    def __init__(self, model: PreTrainedModel, *, product: Product = functional.linear) -> None:
        self.layers = mergeable_layers(model)
        self.product = product
        self.weights: list[Tensor] = []
        """Merged weight of each layer `[out, in]`."""

        # The state that the weights were computed from.
        self._adapters: Tensor | None = None
        self._bases: list[tuple[int, int]] = []

        # Signs of a change that can be read without waiting for a GPU.
        self._signs: tuple[Any, ...] = ()
        self._is_in_use = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute the layers with their merged weights within the block; a block may be within another one."""
        if self._is_in_use:
            yield
            return

        self.refresh(is_in_update=torch.is_grad_enabled())
        forwards: dict[Any, Callable[[Tensor], Tensor]] = {}
        for layer, weight in zip(self.layers, self.weights, strict=True):
            forwards[layer] = partial(_merged_forward, layer, weight, self.product)
        self._is_in_use = True
        try:
            with replaced_forwards(forwards):
                yield
        finally:
            self._is_in_use = False

    def merged_weights(self) -> dict[Any, Tensor]:
        """Return the merged weight of each layer `[out, in]`; they are those of the adapters within `in_use`."""
        return dict(zip(self.layers, self.weights, strict=True))

    @torch.no_grad()
    def refresh(self, *, is_in_update: bool = False) -> None:
        """Merge the adapters again, if they or the weights of the base have changed since the last call.

        Args:
            is_in_update: nothing but an optimizer changes the adapters without a sign, see `_place`.
        """
        # The adapters are compared number by number. They are few; the base is not: its weights are frozen, and loading
        # or moving them changes their address or torch's version counter.
        factors = [factor.weight for layer in self.layers for factor in _factors(layer)]
        bases = [_place(layer.get_base_layer().weight) for layer in self.layers]
        signs = (_n_steps, bases, [_place(factor) for factor in factors])
        if is_in_update and signs == self._signs and _waits(factors):
            return

        adapters = torch.cat([factor.reshape(-1) for factor in factors])
        if bases == self._bases and self._adapters is not None and torch.equal(adapters, self._adapters):
            self._signs = signs
            return

        # In place where possible: a graph that still needs an earlier weight for its backward pass raises an error.
        if bases != self._bases:
            self.weights = [torch.empty_like(_base_weight(layer)) for layer in self.layers]
        for layer, merged in zip(self.layers, self.weights, strict=True):
            down, up = _factors(layer)
            torch.addmm(_base_weight(layer), up.weight, down.weight, alpha=float(layer.scaling[NAME]), out=merged)
        self._adapters = adapters
        self._bases = bases
        self._signs = signs


def mergeable_layers(model: nn.Module) -> list[Any]:
    """Return the layers whose adapters can be merged exactly: plain LoRA in a linear layer, without active dropout.

    Not those with DoRA, which scales rows, and not embeddings, experts or trained rows of tokens.
    """
    lora: Any = import_extra("peft", extra="peft", needed_by="LoRA (policy.args.peft)").tuners.lora
    layers = []
    layer: Any
    for layer in model.modules():
        # PEFT has other classes for other kinds of layers, such as quantised ones.
        if type(layer) is not lora.Linear or not isinstance(layer.base_layer, nn.Linear | Conv1D):
            continue
        if isinstance(layer.lora_dropout[NAME], nn.Identity) and not layer.lora_variant:
            layers.append(layer)
    return layers


def _count_step(*_: Any) -> None:
    global _n_steps
    _n_steps += 1


register_optimizer_step_post_hook(_count_step)


def _place(weight: Tensor) -> tuple[int, int]:
    """Return a weight's address and torch's counter of its changes."""
    return weight.data_ptr(), weight._version


def _waits(weights: Sequence[Tensor]) -> bool:
    """Return whether the process waits for the device of the weights to read a number."""
    return any(weight.device.type != "cpu" for weight in weights)


def _factors(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return the layers with the factors A `[r, in]` and B `[out, r]`."""
    return layer.lora_A[NAME], layer.lora_B[NAME]


def _base_weight(layer: Any) -> Tensor:
    """Return the weight of the base `[out, in]`; GPT-2's is stored the other way round."""
    base = layer.get_base_layer()
    weight: Tensor = base.weight
    return weight.T if isinstance(base, Conv1D) else weight


def _merged_forward(layer: Any, weight: Tensor, product: Product, inputs: Tensor) -> Tensor:
    """Return the output `[..., out]` of a layer for inputs `[..., in]`."""
    bias = layer.get_base_layer().bias
    if not torch.is_grad_enabled():
        return product(inputs, weight, bias)
    down, up = _factors(layer)
    scale = layer.scaling[NAME]
    outputs: Tensor = _MergedProduct.apply(inputs, weight, bias, down.weight, up.weight, scale, product)
    return outputs


class _MergedProduct(torch.autograd.Function):
    """Product with a merged weight, whose gradients are those of the inputs and the adapters.

    It can be differentiated once: a second derivative raises an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, down, up)
        ctx.scale = scale
        ctx.product = product
        return product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, down, up = ctx.saved_tensors
        rows = inputs.reshape(-1, inputs.shape[-1])  # [n, in]
        gradient = gradient.reshape(-1, gradient.shape[-1])  # [n, out]

        # The first layer's inputs, of frozen embeddings, need no gradient.
        of_inputs = of_down = of_up = None
        if ctx.needs_input_grad[0]:
            of_inputs = ctx.product(gradient, weight.T, None).view_as(inputs)
        if ctx.needs_input_grad[3]:
            of_down = (gradient @ up).mul_(ctx.scale).T @ rows
        if ctx.needs_input_grad[4]:
            of_up = gradient.T @ (rows @ down.T).mul_(ctx.scale)
        return of_inputs, None, None, of_down, of_up, None, None
