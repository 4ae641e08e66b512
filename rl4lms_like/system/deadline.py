"""Time limit for Python code that came from elsewhere, such as a chat template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Interrupt the block after some seconds by SIGALRM.

    There is no limit outside of the main thread, on Windows, and where an alarm is set already.

    Args:
        seconds: time limit.
        what: subject of the error's message.

    Raises:
        TimeoutError: the block took longer.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer") or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        # The timer stops before its handler is removed: an alarm without a handler would end the process.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
