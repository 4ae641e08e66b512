"""Reading of files that may come from another user: regular files only, with a limit of size.

A pipe or a device blocks its reader for ever, or fills the memory. These functions look at a file before they open it,
and their errors name it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from rl4lms_like.system.errors import RL4LMsLikeError

LARGEST_TEXT = 2**28
"""Bytes up to which a file of settings, state or messages is read whole."""
LARGEST_TEMPLATE = 2**20
"""Bytes of a chat template."""


def require_regular_file(file: Path) -> None:
    """Check that a path leads to a regular file if it exists; whether it can be read is left to the reader.

    Raises:
        RL4LMsLikeError: it is a device, a pipe or a socket.
    """
    try:
        mode = os.stat(file).st_mode
    except (OSError, ValueError):  # missing, or no valid path: the reader's error says so
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise RL4LMsLikeError(f"{file} is a device or a pipe, which is not read; give a regular file")


def read_small(file: Path, limit: int = LARGEST_TEXT) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be read.
        RL4LMsLikeError: it is a device or a pipe, or larger than the limit.
    """
    require_regular_file(file)
    with file.open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise RL4LMsLikeError(f"{file} is larger than {limit} bytes, and is not read")
    return content


def read_json(file: Path, limit: int = LARGEST_TEXT) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, nested too deeply, or has a number of too many digits.
        RL4LMsLikeError: it is a device or a pipe, or larger than the limit.
    """
    try:
        return json.loads(read_small(file, limit))
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deeply") from error
