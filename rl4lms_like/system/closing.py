"""Closing of what users' code has opened, after a block that may have failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def closed_after(close: Callable[[], None]) -> Iterator[None]:
    """Call `close` after a block. If the block has failed, its error is raised, even if closing fails too."""
    try:
        yield
    except BaseException:
        # A server that is gone fails in both: the first error says where.
        with suppress(Exception):
            close()
        raise
    close()
