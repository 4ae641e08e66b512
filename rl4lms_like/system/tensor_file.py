"""Safetensors files that are written one tensor at a time, with the bytes of `safetensors.torch.save_file`.

    8 bytes    length of the header, little-endian
    header     JSON: name -> {dtype, shape, data_offsets: [start, end]}, filled up with spaces to a multiple of 8 bytes
    data       the values of all tensors, one after the other

`save_file` needs all tensors at once. Here names, shapes and types are enough to begin with, and the tensors can follow
in any order, so that each of them needs memory only while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""torch's types -> their names in the header. The data of later ones come first, so that all values are aligned."""


class TensorFile:
    """A safetensors file; use it as a context manager, and write each tensor in the block.

    Args:
        path: of the file, which is replaced.
        shapes: tensors with the names, shapes and types of those that are written; their values are not read.
        metadata: texts in the header.

    Raises:
        OSError: the file cannot be written.
        ValueError: safetensors has no name for a type.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        unknown = {str(shape.dtype) for shape in shapes.values() if shape.dtype not in _TYPES}
        if unknown:
            raise ValueError(f"a safetensors file cannot have tensors of the type {', '.join(sorted(unknown))}")

        # In safetensors' order: the largest types first, those of one type by name.
        order = list(_TYPES)
        names = sorted(shapes, key=lambda name: (-order.index(shapes[name].dtype), name))
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        self._starts: dict[str, int] = {}
        n_bytes = 0
        for name in names:
            shape = shapes[name]
            end = n_bytes + shape.numel() * shape.element_size()
            offsets = [n_bytes, end]
            header[name] = {"dtype": _TYPES[shape.dtype], "shape": list(shape.shape), "data_offsets": offsets}
            self._starts[name] = n_bytes
            n_bytes = end

        content = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        content += b" " * (-len(content) % 8)
        self._data_start = 8 + len(content)
        self._missing = set(names)
        self._file = path.open("wb")
        self._file.write(len(content).to_bytes(8, "little") + content)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the values of a tensor."""
        # As bytes, since NumPy lacks some of the types.
        values: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._file.seek(self._data_start + self._starts[name])
        self._file.write(memoryview(values))
        self._missing.remove(name)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        assert error is not None or not self._missing, f"not written: {', '.join(sorted(self._missing))}"
