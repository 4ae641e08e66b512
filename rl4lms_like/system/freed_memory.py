"""Memory that the C library keeps when tensors are freed (glibc on Linux)."""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_BLOCK = 2**30
_LARGEST_RESERVE = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let malloc serve large tensors from memory that was freed before; return whether the C library supports it.

    By default, glibc maps every block above 32 MiB from the system and returns it when it is freed, and the kernel
    clears its pages at the first write of the next one. Afterwards the process keeps up to 2 GiB of freed memory. The
    setting is that of the whole process, and cannot be undone.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_RESERVE))
