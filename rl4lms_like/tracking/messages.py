"""This library's messages: on the console, and in `log.txt`.

    logging.getLogger("rl4lms_like.*") ──► LogFile       everything, with what an error came from
                                       └─► ConsoleHandler

What stands in a message is made harmless first: no secret is shown, no terminal steered.
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
"""`extra` of a message that the console shows in one or two lines; `log.txt` has all of it."""


class LogFile(logging.FileHandler):
    """`log.txt`. What it cannot take is said once, and ends no run: the numbers stand elsewhere."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's)
        if not self._has_failed:
            self._has_failed = True
            logger.warning("cannot write to %s: %s; messages are lost", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        with suppress(OSError):  # what is still to be written
            super().close()


class _Formatter(logging.Formatter):
    """Lines that show no secret and cannot steer a terminal, whatever samples, models and errors put into them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


def listen(level: int, handler: logging.Handler) -> list[logging.Handler]:
    """Attaches a handler to this library's messages, and to no other library's."""
    handler.setLevel(level)
    handler.setFormatter(_Formatter("%(asctime)s [%(levelname)s] %(message)s"))
    namespace = logging.getLogger(LIBRARY)
    namespace.addHandler(handler)
    namespace.setLevel(min(level, namespace.level or level))
    return [handler]
