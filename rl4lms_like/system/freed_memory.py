"""Memory that the C library keeps when tensors are freed (glibc on Linux)."""

from __future__ import annotations

import ctypes
import os
import sys

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_BLOCK = 2**30
_LARGEST_RESERVE = 2**31 - 1


def why_returned() -> str | None:
    """Return why freed memory is returned to the system on this machine, or None if the process can keep it."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"):
        return "memory is not managed by glibc"

    # glibc has read these variables at the start of the process, and what users set there is kept.
    is_set = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    if is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return "variables of the environment set glibc's malloc"
    return None


def keep_freed_memory() -> bool:
    """Let malloc serve large tensors from memory that was freed before; return whether it does.

    By default, glibc maps every block above 32 MiB from the system and returns it when it is freed, and the kernel
    clears its pages at the first write of the next one. Afterwards the process keeps up to 2 GiB of freed memory. The
    setting is that of the whole process, and cannot be undone.
    """
    if why_returned() is not None:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_RESERVE))
