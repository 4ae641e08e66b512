"""Devices and dtypes as a config names them, and copies to a device. torch is imported only when it is needed.

device    auto (a GPU if there is one), cpu, cuda, cuda:1, mps
dtype     float32, bfloat16, float16
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from annotated_types import Predicate

from rl4lms_like.system.wording import InWords

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DEVICE = re.compile(r"auto|cpu|mps|xpu|cuda(:\d+)?")


def is_device(name: str) -> bool:
    """Return whether a string is a valid device name, on this machine or on another one."""
    return _DEVICE.fullmatch(name) is not None


Device: TypeAlias = Annotated[str, Predicate(is_device), InWords("'auto', 'cpu', 'cuda', 'cuda:1' ... or 'mps'")]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]


def existing_device(name: str) -> str:
    """Return the name of a device of this machine, with `auto` resolved.

    Raises:
        ValueError: the name is invalid, or this machine has no such device.
    """
    if not is_device(name):
        raise ValueError(f"unknown device {name!r}; expected 'auto', 'cpu', 'cuda', 'cuda:1' ... or 'mps'")
    if name == "cpu":
        return name  # without the import of torch, which takes seconds

    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"

    # torch would report a missing device only when the first tensor is moved there. `cuda` is `cuda:0`.
    kind, _, index = name.partition(":")
    n_devices = torch.get_device_module(kind).device_count()
    if int(index or 0) >= n_devices:
        raise ValueError(f"there is no device {name!r} on this machine, which has {n_devices} {kind!r} devices")
    return name


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device; it is copied from main memory to a GPU without waiting for the GPU.

    Args:
        tensor: on any device.
        device: where it is needed.
        dtype: of the result; default: that of the tensor.
    """
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device, dtype or tensor.dtype)

    # The GPU reads page-locked memory itself, after the work that is queued already, while this process continues. From
    # ordinary memory, a copy waits until that work is done. torch keeps the locked memory until the copy has ended.
    return tensor.to(dtype or tensor.dtype).pin_memory().to(device, non_blocking=True)
