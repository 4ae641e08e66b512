"""Product of many rows with a weight, by the faster of two libraries: x Wᵀ + b in float32 on processors.

torch multiplies float32 matrices with MKL. On AMD processors with AVX-512, oneDNN's kernel takes 0.58 to 0.97 of its
time if there are at least 256 rows and the weight is at least 512 x 512 (docs/speedups.md). With smaller ones it is not
faster, or not by more than the choice of the kernel takes. On other processors it was not measured, so MKL is kept. The
choice depends on nothing but the shapes and the processor, so that the same run has the same bytes.

With few rows, as in a step of generation, most of the time goes into reading the weight. oneDNN reads one that was
packed, stored once in the order in which its kernel needs the numbers, in 0.37 to 0.93 of MKL's time for 4 to 64 rows.

Both sum the products of a row and a column in another order, so results differ by rounding.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_ROWS = 256
"""Number of rows from which oneDNN's kernel is used."""
MIN_SIDE = 512
"""Number of rows and of columns of a weight from which it is used."""
MIN_PACKED = 2**16
"""Size of a weight from which a product with the packed one is faster."""


@cache
def why_mkl() -> str | None:
    """Return why this machine keeps MKL for all products, or None if it uses oneDNN's kernel."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return f"torch {torch.__version__} was built without oneDNN's operator"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "the processor has no AVX-512"

    # Of all processors with AVX-512, MKL chooses slower kernels for those of AMD.
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8", errors="replace")
    return None if is_amd else "the processor is not one of AMD under Linux"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + b, differentiable twice; `torch.nn.functional.linear` up to rounding.

    Args:
        x: `[..., d]`.
        weight: `[m, d]`; may be the transpose of a contiguous matrix.
        bias: `[m]` or None.

    Returns:
        `[..., m]`.

    Examples:
        >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5]))
        tensor([[11.5000]])
    """
    if not _is_faster(x, weight):
        return F.linear(x, weight, bias)
    product: Tensor = _Linear.apply(x, weight, bias)
    return product


def product_of_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x Wᵀ + b by oneDNN's operator for shapes of any size, without gradients; arguments as in `linear`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def is_worth_packing(weight: Tensor) -> bool:
    """Return whether products with a weight are faster if it is packed."""
    return weight.numel() >= MIN_PACKED


def packed(weight: Tensor) -> Tensor:
    """Return a weight `[m, d]`, float32 or bfloat16, as `product_with_packed` needs it: a copy of the same size."""
    n_rows = 32  # for how many rows its blocks are best; it can be any number, and depends on nothing else
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), n_rows)
    return copy


def product_with_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x Wᵀ + b without gradients; `weight` was returned by `packed`, and x has its dtype."""
    return product_of_onednn(x, weight, bias)


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN's kernel is used for x Wᵀ."""
    if why_mkl() is not None or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    is_float32 = x.dtype == weight.dtype == torch.float32
    return is_float32 and min(weight.shape) >= MIN_SIDE and x.numel() >= MIN_ROWS * x.shape[-1]


class _Linear(torch.autograd.Function):
    """x Wᵀ + b by oneDNN's operator, which has no gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product_of_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients  # [..., m]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        flat_grad = grad.reshape(-1, grad.shape[-1])  # [n, m]

        # dL/dx = dL/dy W
        grad_x = linear(grad, weight.t()) if needs_x else None

        # dL/dW = (dL/dy)ᵀ x, where oneDNN is not faster than MKL. A gradient with the layout of its weight is stored
        # as it is; one with another layout would be copied.
        grad_weight = None
        if needs_weight:
            flat_x = x.reshape(-1, x.shape[-1])  # [n, d]
            grad_weight = flat_grad.t() @ flat_x if weight.is_contiguous() else (flat_x.t() @ flat_grad).t()
        grad_bias = flat_grad.sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias
