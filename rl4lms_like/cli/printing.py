"""Print what may hold secrets, control characters or letters that the output lacks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from rl4lms_like.system.secrets import without_secrets
from rl4lms_like.system.wording import printable


def say(message: str) -> None:
    """Print a message to standard error, without secrets and terminal control characters.

    If the stream is closed (Ctrl-C also ends `| tee`), output is discarded, so that the exit status is kept.
    """
    try:
        sys.stderr.write(printable(without_secrets(message)))
        sys.stderr.flush()
        sys.stdout.flush()
    except OSError:
        # Also what is left in the buffers: Python's failure to flush them at its exit would be status 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)


def show(text: str) -> None:
    """Print a text to standard output at once, without secrets and terminal control characters."""
    print(printable(without_secrets(text)), flush=True)


def print_json(line: Mapping[str, Any]) -> None:
    """Print one JSON object; letters that the output lacks are escaped."""
    # JSON itself escapes only the control characters of ASCII, not those that change a terminal's direction of writing.
    # Other encodings than UTF lack most characters.
    is_escaped = sys.stdout.isatty() or not str(sys.stdout.encoding).lower().startswith("utf")
    print(json.dumps(line, ensure_ascii=is_escaped))
