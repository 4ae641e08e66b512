"""Safetensors files that are written one tensor at a time."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl4lms_like.system.tensor_file import _TYPES, TensorFile


def test_the_file_has_the_bytes_of_safetensors_in_any_order_of_writing(tmp_path):
    torch.manual_seed(0)
    tensors = {f"weight.{dtype}": torch.rand(3, 5).mul(9).to(dtype) for dtype in _TYPES}
    tensors |= {"a": torch.rand(7), 'ä "quoted"': torch.rand(2), "scalar": torch.tensor(1.5), "empty": torch.zeros(0)}
    tensors["transposed"] = torch.rand(4, 3).T
    for metadata in (None, {"format": "pt"}):
        expected = tmp_path / "expected.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, expected, metadata)
        written = tmp_path / "written.safetensors"
        with TensorFile(written, tensors, metadata) as file:
            for name in reversed(tensors):
                file.write(name, tensors[name])
        assert written.read_bytes() == expected.read_bytes()


def test_only_shapes_are_needed_before_the_values(tmp_path):
    shapes = {"a": torch.empty(2, 3, device="meta"), "b": torch.empty(1, dtype=torch.int64, device="meta")}
    with TensorFile(tmp_path / "file.safetensors", shapes) as file:
        file.write("b", torch.tensor([5]))
        file.write("a", torch.ones(2, 3))
    loaded = load_file(tmp_path / "file.safetensors")
    assert loaded["b"].tolist() == [5] and loaded["a"].tolist() == [[1.0] * 3] * 2


def test_a_tensor_that_is_left_out_is_an_error(tmp_path):
    file = TensorFile(tmp_path / "file.safetensors", {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(AssertionError, match="not written: b"), file:
        file.write("a", torch.ones(1))


def test_a_type_that_safetensors_lacks_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="complex64"):
        TensorFile(tmp_path / "file.safetensors", {"a": torch.ones(1, dtype=torch.complex64)})
