"""Counts operations for which a process waits for the second device (`second_device`), by the place that runs them.

A GPU works through a queue. Whoever reads a number from it, or the size of a result that depends on values, waits until
the queue is empty, and the GPU then until the queue is filled again.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.policies.second_device import SECOND

DEVICE_TYPE = SECOND.partition(":")[0]
VALUES = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operations that return a number of Python: `item`, `float(x)`, `if x`."""
SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operations whose result has a size that depends on values."""
OUTSIDE = ("transformers", "stable_baselines3", "accelerate")
"""Packages whose own operations are counted under their name."""


class HostWaits(TorchDispatchMode):
    """Counts within its block.

    Attributes:
        waits: place -> number of operations that wait; a place is `module.py function` of this library.
        transfers: number of copies to the device by `to_device`, which do not wait on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.transfers = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(op.name(), args, kwargs):
            place = place_of_call()
            if place == "core/devices.py to_device":
                self.transfers += 1
            else:
                self.waits[place] += 1
        return op(*args, **kwargs)


def waits(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an operation waits for the second device, or copies to it."""
    name = name.removeprefix("aten::")
    base = name.partition(".")[0]
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    devices = {tensor.device.type for tensor in tensors}

    # Copies between devices.
    if base == "_to_copy" and kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    if base in ("_to_copy", "copy_", "_copy_from"):
        return DEVICE_TYPE in devices and len(devices) > 1

    if DEVICE_TYPE not in devices:
        return False
    if base in VALUES | SIZES:
        return True
    if name == "repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    if base in ("index", "index_put", "index_put_"):
        is_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        # torch fills a mask with one number without looking for its positions.
        return is_mask and (base == "index" or args[2].dim() > 0 or args[2].device.type == DEVICE_TYPE)
    return False


def place_of_call() -> str:
    """Return the innermost function of this library, or the package within it, that the current call comes from."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in OUTSIDE:
            if f"/{package}/" in path:
                return package
        if path.endswith("waits_program.py"):
            return "tests"
        if "/rl4lms_like/" in path:
            return f"{path.rpartition('/rl4lms_like/')[2]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward pass"
