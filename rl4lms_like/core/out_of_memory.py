"""Which part of a run the memory did not suffice for.

with in_part("generation"): ...     what torch, NumPy or Python raise there becomes an `OutOfMemoryError` of the part
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from rl4lms_like.core.errors import OutOfMemoryError

Part: TypeAlias = Literal["loading", "generation", "scoring", "update", "evaluation"]

_SAID = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|ALLOC_FAILED|bad_alloc", re.IGNORECASE)
"""What allocators say in errors that are of no class of their own."""

_ADVICE = re.compile(r" If reserved but unallocated| Use `torch\.mps|\n")
"""Where torch's own advice begins."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left: of torch on any device, of NumPy, of Python."""
    if isinstance(error, OSError):  # of `fork`, of `mmap`
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_SAID.search(str(error))))


@contextmanager
def in_part(part: Part) -> Iterator[None]:
    """Says where the memory ran out.

    Raises:
        OutOfMemoryError: it ran out within, and no inner part has said so.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        said = _ADVICE.split(str(error).strip())[0] or type(error).__name__
        raise OutOfMemoryError(part, said) from error
