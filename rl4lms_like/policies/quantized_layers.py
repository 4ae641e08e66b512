"""Linear layers whose frozen weights are quantized: `quantization` of a policy, see `policies.quantization`.

    y = x Wᵀ + b,  W = dequantized(stored)        computed anew in the forward and in the backward pass
    dx = g W                                      W has no gradient

                            stored for each weight
    nf4                     1/2 byte, and 4 bytes of scale for each block of 64
    nf4, double: true       1/2 byte, and 1 byte of scale for each block of 64 (its own scale: 4 for 256 of these)
    int8                    1 byte, and 4 bytes of scale for each row

Embeddings, the output layer, norms and biases stay in float32, and what a family needs in float32 itself (transformers'
`_keep_in_fp32_modules`). All that is stored are plain frozen parameters: networks share them, and they are moved and
saved as other weights are.

The layers of bitsandbytes are not used. On processors with AVX512-BF16 they compute in bfloat16 by a kernel without
gradients, and where rows are no multiple of 64 they dequantize to wrong numbers; neither raises an error. Only its
functions that quantize and dequantize blocks are called, and its fused product on GPUs, where no gradient is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl4lms_like.policies.faster_layers import ONEDNN_CLASSES
from rl4lms_like.policies.quantization import KEY, require_package
from rl4lms_like.system.errors import ModelError, import_extra

BLOCK = 64
"""Weights with one scale in `nf4`."""
DOUBLE_BLOCK = 256
"""Scales with one scale of their own, with `double: true`."""


Stored: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a stored tensor -> shape and type."""


class QuantizedLinear(nn.Linear):
    """Linear layer with a quantized weight, made from a plain one.

    Args:
        layer: `nn.Linear`, or GPT-2's `Conv1D`, whose weight is stored the other way round.
        quantization: the block `quantization`.
    """

    block: ClassVar[int] = 1
    """The number of weights of a layer must be a multiple of this."""

    def __init__(self, layer: nn.Module, quantization: Mapping[str, Any]) -> None:
        # Not by `nn.Linear`, which would allocate and initialize a whole weight.
        nn.Module.__init__(self)
        plain: Any = layer
        self.is_transposed = isinstance(layer, Conv1D)
        weight: Tensor = plain.weight.detach()
        weight = weight.T.contiguous() if self.is_transposed else weight
        self.out_features, self.in_features = weight.shape
        self._store(weight, quantization)
        self.register_parameter("bias", plain.bias)

    def _store(self, weight: Tensor, quantization: Mapping[str, Any]) -> None:
        """Quantize a weight `[out, in]` into frozen parameters, of which `weight` is the largest."""
        raise NotImplementedError

    @classmethod
    def stored(cls, n_out: int, n_in: int, quantization: Mapping[str, Any]) -> Stored:
        """Return shapes and types of what a layer stores, for estimates."""
        raise NotImplementedError

    def _keep(self, **tensors: Tensor) -> None:
        """Register frozen parameters."""
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight `[out, in]` that the layer computes with."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """Return the output `[..., out]` of `[..., in]`."""
        # As torch's own operators under autocast; those of other libraries do not cast their inputs.
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        with torch.autocast(device, enabled=False):
            return self._product(input, bias)

    def _product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = _Product.apply(input, bias, self)
        return output

    @property
    def plain_shape(self) -> tuple[int, int]:
        """Shape of the weight in the plain layer."""
        shape = (self.out_features, self.in_features)
        return shape[::-1] if self.is_transposed else shape

    @property
    def n_weights(self) -> int:
        """Number of weights."""
        return self.in_features * self.out_features


class NF4Linear(QuantizedLinear):
    """Layer with 4-bit NormalFloats; `weight` has two of them in each byte `[n_weights / 2, 1]`."""

    block = BLOCK
    scales: Tensor
    scales_of_scales: Tensor
    mean_scale: Tensor
    scale_values: Tensor

    def _store(self, weight: Tensor, quantization: Mapping[str, Any]) -> None:
        self.is_double = bool(quantization.get("double", False))

        # A row is a block, wherever rows of the weight begin: see `_state`.
        packed, state = _bitsandbytes().quantize_4bit(
            weight.reshape(-1, BLOCK), blocksize=BLOCK, quant_type="nf4", compress_statistics=self.is_double
        )
        self._keep(weight=packed, scales=state.absmax)
        if self.is_double:
            self._keep(scales_of_scales=state.state2.absmax, mean_scale=state.offset.reshape(1))

            # The 256 values that an 8-bit scale can have; one table for all layers would not be moved with them.
            self._keep(scale_values=state.state2.code)

    @classmethod
    def stored(cls, n_out: int, n_in: int, quantization: Mapping[str, Any]) -> Stored:
        n_blocks = n_out * n_in // BLOCK
        stored: Stored = {"weight": ((n_out * n_in // 2, 1), torch.uint8), "scales": ((n_blocks,), torch.float32)}
        if quantization.get("double"):
            stored["scales"] = ((n_blocks,), torch.uint8)
            stored["scales_of_scales"] = ((-(-n_blocks // DOUBLE_BLOCK),), torch.float32)
            stored["mean_scale"] = ((1,), torch.float32)
            stored["scale_values"] = ((256,), torch.float32)
        return stored

    def _state(self, shape: tuple[int, int], dtype: torch.dtype) -> Any:
        """Return bitsandbytes' description of the stored weight, as a matrix of a shape."""
        library = _bitsandbytes()
        state = library.QuantState(
            absmax=self.scales,
            shape=torch.Size(shape),
            code=library.get_4bit_type("nf4", device=self.scales.device),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
        )
        if self.is_double:
            state.offset = self.mean_scale[0]
            state.state2 = library.QuantState(
                absmax=self.scales_of_scales, code=self.scale_values, blocksize=DOUBLE_BLOCK, dtype=torch.float32
            )
            state.nested = True
        return state

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        # bitsandbytes' kernel for processors takes rows for whole blocks. Blocks are numbered through all rows, so a
        # matrix with a block in each row has the same numbers.
        shape = (self.n_weights // BLOCK, BLOCK)
        if self.in_features % BLOCK == 0:
            shape = (self.out_features, self.in_features)
        weight: Tensor = _bitsandbytes().dequantize_4bit(self.weight, self._state(shape, dtype))
        return weight.reshape(self.out_features, self.in_features)

    def _product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        # One token for each text, as in generation: the kernel reads the stored weight only.
        needs_gradient = torch.is_grad_enabled() and input.requires_grad
        if input.device.type == "cpu" or needs_gradient or self.in_features % BLOCK:
            return super()._product(input, bias)
        state = self._state((self.out_features, self.in_features), input.dtype)
        output: Tensor = import_extra("bitsandbytes", extra="bitsandbytes", needed_by=KEY).matmul_4bit(
            input, self.weight, state, bias=bias
        )
        return output


class Int8Linear(QuantizedLinear):
    """Layer with 8-bit integers `[out, in]` and a scale for each row `[out, 1]`."""

    scales: Tensor

    def _store(self, weight: Tensor, quantization: Mapping[str, Any]) -> None:
        torchao = import_extra("torchao.quantization", extra="torchao", needed_by="quantization: {id: int8}")
        holder = nn.Linear(1, 1, bias=False)
        holder.weight = nn.Parameter(weight, requires_grad=False)
        torchao.quantize_(holder, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
        stored: Any = holder.weight

        # torchao's tensor is taken apart: its product would keep the dequantized weight for the backward pass.
        self._keep(weight=stored.qdata, scales=stored.scale)

    @classmethod
    def stored(cls, n_out: int, n_in: int, quantization: Mapping[str, Any]) -> Stored:
        return {"weight": ((n_out, n_in), torch.int8), "scales": ((n_out, 1), torch.float32)}

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.weight * self.scales).to(dtype)


_QUANTIZATION = "rl4lms_like_quantization"
"""Attribute of a quantized model with its block."""

LAYERS: dict[str, type[QuantizedLinear]] = {"nf4": NF4Linear, "int8": Int8Linear}
"""Id of a quantization -> class of its layers."""


class _Product(torch.autograd.Function):
    """Product with a quantized weight. It keeps neither input nor weight, and has derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(input, layer.dequantized(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ ctx.layer.dequantized(gradient.dtype), None, None


def quantization_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the block with which a model was quantized; None if its weights are not."""
    quantization: dict[str, Any] | None = getattr(model, _QUANTIZATION, None)
    return quantization


@torch.no_grad()
def quantize(
    model: PreTrainedModel, quantization: Mapping[str, Any], *, layer_class: type[QuantizedLinear] | None = None
) -> None:
    """Replace the linear layers of a model by quantized ones and freeze all of its weights, in place.

    The output layer of a language model, the head of a classifier and all that is not in a linear layer stay as they
    are.

    Args:
        model: not one whose weights other models share, which would keep them.
        quantization: the block `quantization`.
        layer_class: other layers than those of the quantization.

    Raises:
        MissingExtraError: the package that quantizes is not installed.
        ModelError: the model has no linear layers that can be quantized.
    """
    require_package(quantization)
    kind = layer_class or LAYERS[quantization["id"]]
    names = layers_to_quantize(model, LAYERS[quantization["id"]].block)
    if not names:
        raise ModelError(
            f"{type(model).__name__} ({model.name_or_path!r}) has no linear layers that can be quantized: remove {KEY}"
        )
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(model.get_submodule(name), quantization))
    model.requires_grad_(False)
    setattr(model, _QUANTIZATION, dict(quantization))


def layers_to_quantize(model: PreTrainedModel, block: int) -> list[str]:
    """Return the names of the linear layers whose numbers of weights are multiples of `block`, without the heads."""
    # Heads are outside of the base model, or the output layer of a family that has no such part.
    inside = set(model.base_model.modules()) - {model.get_output_embeddings()}
    in_float32: set[str] = set()
    for module in model.modules():
        in_float32.update(getattr(module, "_keep_in_fp32_modules", None) or ())

    names = []
    for name, layer in model.named_modules():
        # Not of subclasses, except those that a speedup makes of plain layers.
        is_linear = type(layer) in ONEDNN_CLASSES or type(layer) in ONEDNN_CLASSES.values()
        if not is_linear or layer not in inside or in_float32.intersection(name.split(".")):
            continue
        weight: Any = layer.weight
        if weight.numel() % block == 0:
            names.append(name)
    return names


def dequantize(model: nn.Module) -> None:
    """Replace the quantized layers of a model by plain ones with the weights that they compute with, in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLinear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain_layer(layer))
    setattr(model, _QUANTIZATION, None)


@torch.no_grad()
def plain_layer(layer: QuantizedLinear, delta: Tensor | None = None) -> nn.Module:
    """Return the layer in float32 that computes what a quantized one does, of the class that it was made from.

    Args:
        layer: quantized layer; not changed, and its bias is shared.
        delta: change of the weight `[out, in]`, that of an adapter.
    """
    weight = layer.dequantized()
    if delta is not None:
        weight = weight + delta.to(weight.dtype)

    # On `meta`, the weight that is replaced needs no memory.
    plain: Any
    with torch.device("meta"):
        if layer.is_transposed:
            plain = Conv1D(layer.out_features, layer.in_features)
        else:
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight = nn.Parameter(weight.T.contiguous() if layer.is_transposed else weight, requires_grad=False)
    plain.bias = layer.bias
    return plain


def n_weights(model: nn.Module) -> int:
    """Return the number of weights of a model, where a quantized one counts as one."""
    quantized = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    stored = {id(weight) for layer in quantized for name, weight in layer.named_parameters() if name != "bias"}
    n_others = sum(weight.numel() for weight in model.parameters() if id(weight) not in stored)
    return n_others + sum(layer.n_weights for layer in quantized)


def _bitsandbytes() -> Any:
    return import_extra("bitsandbytes.functional", extra="bitsandbytes", needed_by="quantization: {id: nf4}")
