"""Memory that the allocator keeps after tensors are freed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def return_freed_memory() -> None:
    """Return freed memory to the operating system, where the C library has a function for it (glibc).

    glibc keeps freed blocks of up to 32 MiB, also between blocks that are still in use. Tensors of another batch, with
    other sizes, do not fit into these gaps, so a process grows from one forward pass to the next.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # no C library to be opened by that name, as on Windows
        return None
