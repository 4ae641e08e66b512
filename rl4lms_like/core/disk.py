"""What to say of a file that cannot be written: which one, why, and the way out where the disk is full."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SAID = re.compile(r"os error (\d+)")
"""How libraries in Rust, safetensors and tokenizers, give an error's number."""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Puts the file's name into an `OSError` that has none, as those of `write` have none.

    Raises:
        OSError: as within, with the name.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(file)) from error
        raise


def reason(error: OSError) -> str:
    """Why a file could not be written, and what to do about it."""
    if is_full(error):
        return f"{error}. Make room there, then give the same command again"
    return str(error)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, a quota or a limit on files is exhausted."""
    number = getattr(error, "errno", None)
    if number is None and (found := _SAID.search(str(error))):
        number = int(found[1])
    return number in _FULL
