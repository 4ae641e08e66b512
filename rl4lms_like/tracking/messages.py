"""Log messages of this library, on the console and in `log.txt`.

    logging.getLogger("rl4lms_like.*") ──► LogFile       everything, with tracebacks
                                       └─► ConsoleHandler

Secrets and terminal control characters are removed from all messages.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from rl4lms_like.core.secrets import without_secrets
from rl4lms_like.core.wording import printable

logger = logging.getLogger(__name__)
LIBRARY = "rl4lms_like"

IN_SHORT = {"in_short": True}
"""`extra` of a message that the console shortens to one or two lines; `log.txt` has it in full."""


class LogFile(logging.FileHandler):
    """Handler for `log.txt`. A write error gives one warning and does not end the run."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's)
        if not self._has_failed:
            self._has_failed = True
            logger.warning("cannot write to %s: %s; messages are lost", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        with suppress(OSError):  # raised if buffered messages cannot be written
            super().close()


class _Formatter(logging.Formatter):
    """Formatter that removes secrets and terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


def listen(level: int, handler: logging.Handler) -> list[logging.Handler]:
    """Attach a handler to the loggers of this library only."""
    handler.setLevel(level)
    handler.setFormatter(_Formatter("%(asctime)s [%(levelname)s] %(message)s"))
    namespace = logging.getLogger(LIBRARY)
    namespace.addHandler(handler)
    namespace.setLevel(min(level, namespace.level or level))
    return [handler]
