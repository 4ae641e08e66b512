"""Activations in main memory from the forward to the backward pass (`activation_offload`).

    forward pass     a tensor that autograd saves ─ copied to main memory ─ its memory on the device is free
    backward pass    the copy ─ back on the device, just before it is used

torch's `save_on_cpu` copies weights as well, which are in the device's memory anyway, and gives copies other strides,
with which kernels may sum in another order. Here weights stay, and values and strides are those of the saved tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 1024
"""Tensors below this stay where they are: starting a copy takes longer than one of so few bytes."""


class Copy(NamedTuple):
    """Saved tensor in main memory.

    Attributes:
        values: contiguous, of size 1 in the dimensions in which the tensor repeats its values (stride 0).
        shape: of the tensor.
        stride: of the tensor.
        device: of the tensor.
    """

    values: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


class _Kept(NamedTuple):
    """Saved tensor that stays where it is, a weight or a small one, and torch's counter of its changes."""

    tensor: Tensor
    version: int


def saved_in_main_memory(weights: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Save tensors of forward passes within the block in main memory until their backward pass, except weights.

    Args:
        weights: what stays on the device: parameters, buffers and other tensors that exist in any case.

    Raises:
        RuntimeError: in the backward pass, a tensor that stayed has changed since the forward pass.
    """
    # A saved tensor may be a view of a weight, such as its transpose, and then has the same storage.
    storages = {_storage_of(weight) for weight in weights}

    def pack(tensor: Tensor) -> Copy | _Kept:
        if _storage_of(tensor) in storages or tensor.nbytes < MIN_BYTES:
            return _Kept(tensor, tensor._version)
        return to_main_memory(tensor)

    return saved_tensors_hooks(pack, _unpacked)


def _storage_of(tensor: Tensor) -> int:
    """Return a number that only tensors with the same memory share, as long as one of them exists."""
    return tensor.untyped_storage()._cdata


def to_main_memory(tensor: Tensor) -> Copy:
    """Copy a saved tensor to main memory."""
    repeated = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
    source = tensor[tuple(repeated)]

    # From and to page-locked memory, the device copies while the process continues: both copies are in the queue of its
    # work, before the memory is used again. torch keeps locked memory until its copies have ended.
    values = torch.empty(source.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    values.copy_(source, non_blocking=tensor.is_cuda)
    return Copy(values, tensor.shape, tensor.stride(), tensor.device)


def _unpacked(saved: Copy | _Kept) -> Tensor:
    if isinstance(saved, _Kept):
        # Without hooks, torch checks this itself.
        if saved.tensor._version != saved.version:
            raise RuntimeError("a saved tensor has changed between its forward and backward pass")
        return saved.tensor

    values, shape, stride, device = saved
    tensor = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=device)
    tensor.copy_(values, non_blocking=device.type == "cuda")
    return tensor.expand(shape)
