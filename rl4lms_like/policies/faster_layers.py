"""Layers of a language model in faster forms that compute the same numbers up to rounding; see `policies.speedups`.

    fused_activations   `gelu_new` (GPT-2) as one operation instead of eight
    onednn              linear layers by `core.products.linear`
    grouped_attention   keys and values of grouped-query attention without a copy for each head

Layers are changed in place and keep their names and weights, so that checkpoints stay as they are. What holds for
some passes only replaces their `forward` for as long (`replaced_forwards`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.pytorch_utils import Conv1D

from rl4lms_like.core.products import linear, why_mkl
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.speedups import Speedups
from rl4lms_like.system.freed_memory import why_returned


def speed_up(model: PreTrainedModel, speedups: Speedups, *, computes_eagerly: bool) -> None:
    """Change a model's layers in place to those that its policy's speedups name.

    Args:
        model: language model or critic.
        speedups: of the policy.
        computes_eagerly: on a processor, with whole weights and without `torch.compile`, as oneDNN's operator is used.
    """
    if speedups.fused_activations:
        fuse_activations(model)
    if speedups.grouped_attention:
        group_attention(model)
    if speedups.onednn and computes_eagerly and why_mkl() is None:
        use_onednn(model)


def reasons_without_effect(
    arguments: PolicyArguments, network: PretrainedConfig, *, is_on_processor: bool, is_sharded: bool
) -> dict[str, str]:
    """Return the speedups that cannot change a run on this machine, each with the reason.

    Args:
        arguments: of the policy.
        network: config of its model.
        is_on_processor: the run does not use a GPU.
        is_sharded: weights are split over processes.
    """
    reasons: dict[str, str] = {}
    if not is_on_processor:
        reasons |= dict.fromkeys(
            ("keep_freed_memory", "onednn", "grouped_attention", "packed_weights"), "the run uses a GPU"
        )
    elif returned := why_returned():
        reasons["keep_freed_memory"] = returned

    products = why_mkl()
    if arguments.compile:
        products = "compile: true chooses the products"
    elif is_sharded:
        products = "weights are split (distributed.strategy: fsdp)"
    if products is not None:
        reasons.setdefault("onednn", products)
        reasons.setdefault("packed_weights", products)
    elif not arguments.generates_packed:
        reasons.setdefault("packed_weights", "dtype: bfloat16 generates under autocast")

    # Families have different names for their activation.
    text = network.get_text_config()
    if "gelu_new" not in vars(text).values():
        reasons["fused_activations"] = "the model's activation is not gelu_new"
    if getattr(text, "num_key_value_heads", None) in (None, text.num_attention_heads):
        reasons.setdefault("grouped_attention", "the model's attention has no groups")
    elif arguments.attn_implementation not in (None, "sdpa"):
        reasons.setdefault("grouped_attention", f"attn_implementation is {arguments.attn_implementation}, not sdpa")
    return reasons


def fuse_activations(model: nn.Module) -> int:
    """Replace `gelu_new` by torch's approximation of GELU with tanh, which is the same function.

    Its backward pass keeps the input only, where `gelu_new` keeps five tensors of this size.

    Returns:
        The number of replaced layers.
    """
    n_replaced = 0
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is NewGELUActivation:
                setattr(parent, name, nn.GELU(approximate="tanh"))
                n_replaced += 1
    return n_replaced


class OneDNNLinear(nn.Linear):
    """Linear layer by `core.products.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class OneDNNConv1D(Conv1D):
    """Linear layer of GPT-2, whose weight is `[d, m]`, by `core.products.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


ONEDNN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: OneDNNLinear, Conv1D: OneDNNConv1D}


def use_onednn(model: nn.Module) -> None:
    """Compute the products of linear layers by `core.products.linear`."""
    # Not of subclasses, such as quantised layers, which compute their products in their own way.
    for layer in model.modules():
        faster_class = ONEDNN_CLASSES.get(type(layer))
        if faster_class is not None:
            layer.__class__ = faster_class


@contextmanager
def replaced_forwards(forwards: Mapping[Any, Callable[..., Tensor]]) -> Iterator[None]:
    """Compute the output of layers by these functions within the block; a block may be within another one.

    A function is an attribute of its layer, which takes precedence over the method of the class. It exists only within
    the block, so that copies and files of the model are those of its classes.
    """
    before = {layer: vars(layer).get("forward") for layer in forwards}
    for layer, forward in forwards.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer, forward in before.items():
            del layer.forward
            if forward is not None:
                layer.forward = forward


IS_GROUPED = "attends_in_groups"
"""Attribute of attention layers that `group_attention` has changed."""


def group_attention(model: PreTrainedModel) -> int:
    """Let grouped-query attention with a mask read the keys and values of a group where they are, on processors.

    transformers copies them for each head of the group if there is a mask, because kernels of GPUs need that.

    Returns:
        The number of attention layers that this concerns.
    """
    if model.config.get_text_config()._attn_implementation != "sdpa" or not _kernel_reads_groups():
        return 0
    layers = [layer for layer in model.modules() if getattr(layer, "num_key_value_groups", 1) > 1]
    for layer in layers:
        setattr(layer, IS_GROUPED, True)

    # All models of the process call it, and the others get transformers' own function.
    AttentionInterface.register("sdpa", _sdpa)
    return len(layers)


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention, see `group_attention`; arguments and result are those of transformers' function.

    Args:
        module: attention layer.
        query: `[n, heads, q, d]`.
        key: `[n, groups, k, d]`.
        value: `[n, groups, k, d]`.
        attention_mask: `[n, 1, q, k]` or None.
        dropout: rate.
        scaling: of the products of queries and keys; default: `d ** -0.5`.
        options: others of transformers.

    Returns:
        `[n, q, heads, d]`, and None in place of the attention's weights.
    """
    # Without a mask, and with one query (a step of generation), transformers does not copy either.
    is_grouped = getattr(module, IS_GROUPED, False) and query.device.type == "cpu"
    is_copied = attention_mask is not None and query.shape[2] > 1
    is_plain = options.get("position_bias") is None and options.get("softcap") is None
    if not (is_grouped and is_copied and is_plain):
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output

    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


@cache
def _kernel_reads_groups() -> bool:
    """Return whether the fused attention of this torch reads groups; otherwise a slow one would replace it."""
    query, key = torch.zeros(1, 2, 2, 8), torch.zeros(1, 1, 2, 8)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True)
    except RuntimeError:
        return False
    return True
