"""Attribute out-of-memory errors to the part of a run in which they occur.

with blame_memory_errors_on("generation"): ...

Memory errors of torch, NumPy and Python become an `OutOfMemoryError` of this part.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from rl4lms_like.system.errors import OutOfMemoryError

Part: TypeAlias = Literal["loading", "generation", "scoring", "update", "evaluation"]

_TEXTS = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|ALLOC_FAILED|bad_alloc", re.IGNORECASE)
"""Messages of allocators that raise a generic exception class."""

_ADVICE = re.compile(r" If reserved but unallocated| Use `torch\.mps|\n")
"""Start of torch's own advice in a message."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch (on any device), NumPy or Python means that memory is exhausted."""
    if isinstance(error, OSError):  # from `fork` or `mmap`
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):
        return True

    # torch's `OutOfMemoryError` is a `RuntimeError` too, but some of its allocators only raise the latter.
    return isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error)))


@contextmanager
def blame_memory_errors_on(part: Part) -> Iterator[None]:
    """Convert memory errors in this block to an `OutOfMemoryError` that names the part.

    Raises:
        OutOfMemoryError: memory ran out in the block. An `OutOfMemoryError` of an inner part is passed on.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # torch's advice is cut off: the run adds advice in its own settings. A `MemoryError` often has no text at all.
        message = _ADVICE.split(str(error).strip())[0] or type(error).__name__
        raise OutOfMemoryError(part, message) from error
