"""Freed memory is returned to the operating system."""

import ctypes
from pathlib import Path

import pytest
import torch

from rl4lms_like.system.freed_memory import return_freed_memory

MIB = 2**20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc on Linux only"
)
def test_gaps_between_tensors_in_use_are_returned():
    tensors = [torch.ones(64 * 1024 // 4) for _ in range(2000)]  # 125 MiB in blocks of 64 KiB
    in_use = tensors[::50]
    del tensors
    before = resident()
    return_freed_memory()
    assert before - resident() > 100 * MIB
    assert all(bool((tensor == 1).all()) for tensor in in_use)
