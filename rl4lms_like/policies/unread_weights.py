"""Weights of a checkpoint that are read only after they have been split over processes.

    safetensors files ─ names, shapes, types ─> `UnreadTensor`s ─ transformers ─> a model without values
                                                                                          │ copied, adapters, split
    safetensors files ─ this process's rows of each weight ─────────────────────> split weights

transformers loads the tensors by its own rules, as if they had values: names, tied weights, missing weights and
buffers are those of a usual load. Nothing can be computed with an `UnreadTensor`. Where transformers or PEFT have to
compute (fused experts, a comparison of tied weights, DoRA), an error is raised, and the model must be loaded whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
"""Types of the tensors that can be read later: those that models compute with, and codes of moments in 8 bits."""


class UnreadTensor(Tensor):
    """A tensor in safetensors files. It has a shape and a type, but no values.

    It can be detached, converted to another type, deep-copied, and become a parameter. All other operations raise a
    `RuntimeError`.

    Attributes:
        parts: path of a file, and the number of rows in it; the rows of the files follow each other.
        key: name of the tensor in each of the files.
    """

    parts: tuple[tuple[str, int], ...]
    key: str

    @staticmethod
    def __new__(
        cls, parts: Sequence[tuple[str, int]], key: str, shape: Sequence[int], dtype: torch.dtype
    ) -> UnreadTensor:
        size = torch.Size(shape)
        tensor: UnreadTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        tensor.parts = tuple(parts)
        tensor.key = key
        return tensor

    def rows(self, start: int, end: int) -> Tensor:
        """Read rows of the tensor; a new tensor `[end - start, ...]` of this one's type."""
        rows = torch.empty((end - start, *self.shape[1:]), dtype=self.dtype)
        first = 0  # row of the tensor with which a file begins
        for path, n_rows in self.parts:
            begin = max(start, first)
            stop = min(end, first + n_rows)
            if begin < stop:
                # Opened for each tensor: the pages of a file that stays open would count as memory of this process.
                with safe_open(path, "pt") as file:
                    rows[begin - start : stop - start] = file.get_slice(self.key)[begin - first : stop - first]
            first += n_rows
        return rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out the few operations that need no values."""
        tensor = args[0]
        options = kwargs or {}
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.alias.default:
            return cls(tensor.parts, tensor.key, tensor.shape, tensor.dtype)
        if func is torch.ops.aten._to_copy.default and options.get("device") in (None, torch.device("cpu")):
            return cls(tensor.parts, tensor.key, tensor.shape, options.get("dtype") or tensor.dtype)
        # Not a TypeError, which Python would replace by its own in `weight + 1`.
        raise RuntimeError(f"{func} needs values of {tensor!r}, which have not been read")

    def __deepcopy__(self, memo: dict[int, Any]) -> UnreadTensor:
        """Return another one of the same values."""
        if id(self) not in memo:
            copied = self.detach()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, requires_grad=self.requires_grad)
            memo[id(self)] = copied
        unread: UnreadTensor = memo[id(self)]
        return unread

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreadTensor({self.key!r} in {', '.join(path for path, _ in self.parts)})"


def unread_checkpoint(
    model_name: str, config: PretrainedConfig, *, local_files_only: bool = False
) -> dict[str, Tensor] | None:
    """Return the tensors of a model's safetensors files by name, whose matrices are not read.

    Vectors are read: they are small, and models may change them when they are loaded.

    Args:
        model_name: hub id or local folder of a whole model.
        config: its config.
        local_files_only: do not query the hub.

    Returns:
        None if the model has other files, or its weights are quantized.
    """
    # transformers finds the files of some models by more than the two usual names.
    is_special = getattr(config, "transformers_weights", None) or getattr(type(config), "extra_files", ())
    if is_special or getattr(config, "quantization_config", None) is not None:
        return None
    files = _safetensors_files(model_name, local_files_only=local_files_only)
    if not files:
        return None

    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= tensors_without_matrices(path)
    if any(not tensor.is_floating_point() or tensor.dtype not in _TYPES.values() for tensor in tensors.values()):
        return None
    return tensors


def tensors_without_matrices(path: str | Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, whose matrices are not read.

    Args:
        path: of the file.
        prefixes: beginnings of the names of these matrices; all others are read.
    """
    tensors: dict[str, Tensor] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            header = file.get_slice(name)
            shape = header.get_shape()
            dtype = _TYPES.get(header.get_dtype())
            if name.startswith(prefixes) and dtype is not None and len(shape) > 1 and 0 not in shape:
                tensors[name] = UnreadTensor([(str(path), shape[0])], name, shape, dtype)
            else:
                tensors[name] = file.get_tensor(name)
    return tensors


def tensors_in_parts(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the tensors, by name, of which each file has some rows; the rows of the files follow each other.

    Raises:
        ValueError: the files do not belong together.
    """
    headers: list[dict[str, tuple[list[int], str]]] = []
    for path in files:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            headers.append({name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()})

    tensors: dict[str, Tensor] = {}
    for name in sorted(set().union(*headers)):
        if any(name not in header for header in headers):
            raise ValueError(f"rows of {name} are missing")
        kinds = {(tuple(header[name][0][1:]), header[name][1]) for header in headers}
        if len(kinds) > 1:
            raise ValueError(f"the rows of {name} have different lengths or types")
        ((columns, dtype),) = kinds
        parts = [(str(path), header[name][0][0]) for path, header in zip(files, headers, strict=True)]
        n_rows = sum(n for _, n in parts)
        tensors[name] = UnreadTensor(parts, name, (n_rows, *columns), _TYPES[dtype])
    return tensors


def _safetensors_files(model_name: str, *, local_files_only: bool) -> list[str]:
    """Return the paths of a model's safetensors files, as transformers chooses them; empty if it has none."""
    options: dict[str, Any] = {
        "local_files_only": local_files_only,
        "_raise_exceptions_for_missing_entries": False,
    }
    single = cached_file(model_name, SAFE_WEIGHTS_NAME, **options)
    if single is not None:
        return [single]
    index = cached_file(model_name, SAFE_WEIGHTS_INDEX_NAME, **options)
    if index is None:
        return []
    files, _ = get_checkpoint_shard_files(model_name, index, local_files_only=local_files_only)
    return [str(Path(file)) for file in files]


def read_buffers(model: nn.Module) -> None:
    """Read the buffers of a model that are not read yet, in place: they are not split."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, UnreadTensor):
                module._buffers[name] = buffer.rows(0, len(buffer))
