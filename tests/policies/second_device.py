"""A second torch device: the first GPU, or without a GPU `second:0`, whose tensors are in main memory.

Like a GPU, that one refuses operations on tensors of several devices. torch has one such device per process, which it
then takes for an accelerator, so that only programs of their own call `register`: pytest's process imports this module,
too, when it collects doctests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class Backend(_DummyBackendModule):
    """Functions of the module `torch.second`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


SECOND = "cuda:0" if torch.cuda.is_available() else "second:0"


class SecondTensor(torch.Tensor):
    """A tensor on the second device.

    Attributes:
        inner: its values, a tensor in main memory.
    """

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        return SecondTensor(self.inner)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.inner = inner_of(values)  # torch's own would not replace it

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch refuses it for subclasses

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert a tensor of the second device to numpy: use Tensor.cpu()")
        return self.cpu().numpy()

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SecondTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=SECOND, **layout)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None) -> Any:
        if op.name() == "aten::copy_":
            return copy(args[1], args[0])
        kwargs, tensors = (
            dict(kwargs or {}),
            [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)],
        )
        if any(not isinstance(tensor, cls) and tensor.dim() for tensor in tensors):
            raise RuntimeError(f"{op.name()}: expected all tensors to be on the same device")
        leaves = torch.device(kwargs.get("device") or SECOND).type != "second"
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        given = {id(inner_of(tensor)): tensor for tensor in tensors}  # what an operation in place returns
        result = op(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        if leaves and id(result) in given:  # `to`, within the dispatch of another subclass
            return result.clone()
        return tree_map(lambda x: given.get(id(x)) if id(x) in given else x if leaves else outer_of(x), result)


def inner_of(value: Any) -> Any:
    return value.inner if isinstance(value, SecondTensor) else value


def outer_of(value: Any) -> Any:
    return SecondTensor(value) if isinstance(value, torch.Tensor) else value


def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    inner_of(target).copy_(inner_of(source))
    return target


def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> torch.Tensor:
    return SecondTensor(torch.empty(size, dtype=dtype))


def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None) -> torch.Tensor:
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype))


def arange(*limits, dtype=None, layout=None, device=None, pin_memory=None) -> torch.Tensor:
    return SecondTensor(torch.arange(*limits, dtype=dtype))  # torch's own resizes an empty tensor, not its wrapper


KERNELS = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_copy_from": copy,
    "arange": arange,
    "arange.start": arange,
    "arange.start_step": arange,
}
LIBRARY = torch.library.Library("aten", "IMPL")  # its kernels are there as long as it is


def register() -> None:
    """Make the device one of this process, until it ends."""
    if SECOND != "second:0":
        return
    _setup_privateuseone_for_python_backend("second", backend_module=Backend())
    torch.__future__.set_swap_module_params_on_conversion(True)  # weights stay tied when a module moves to it
    for name, kernel in KERNELS.items():
        LIBRARY.impl(name, kernel, "PrivateUse1")
