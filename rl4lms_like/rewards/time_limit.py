"""Time limit for rewards that run in the training process.

    within(30, call)        SIGALRM after 30 s raises `TimeIsUp` inside Python code, sleep and sockets

This cannot interrupt C code that holds the GIL or code that catches `BaseException` in a loop. It works neither outside
the main thread nor on Windows. Worker processes can be stopped in all these cases (`env.reward_workers`). Other signals
are unaffected; an alarm that was already set is postponed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from rl4lms_like.system.errors import ConfigError, ConfigIssue

T = TypeVar("T")


class TimeIsUp(BaseException):
    """Raised when a reward takes too long; not an `Exception`, so that `except Exception` does not catch it."""


def check_time_limit(seconds: float | None) -> None:
    """Raise a `ConfigError` if this thread cannot interrupt a call after `seconds`; None needs no interruption."""
    if seconds is None:
        return

    if not hasattr(signal, "setitimer"):
        why = "this system has no SIGALRM"
    elif threading.current_thread() is not threading.main_thread():
        why = "only the main thread receives SIGALRM"
    else:
        return
    message = f"a reward in this process cannot be interrupted: {why}; set env.reward_workers to 1"
    raise ConfigError([ConfigIssue("env.reward_timeout", message)])


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """Return the result of a call, or raise `TimeIsUp` inside it every `seconds` until it stops.

    If the call catches `TimeIsUp` and returns a value, the value is discarded and `TimeIsUp` is raised. Without a limit
    (None), it is a plain call. A thread that cannot interrupt the call is a `ConfigError`.
    """
    if seconds is None:
        return call()

    check_time_limit(seconds)
    message = f"not done within {seconds:g} s (env.reward_timeout)"
    is_armed = True
    has_rung = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal has_rung
        if is_armed:
            has_rung = True
            raise TimeIsUp(message)

    # The alarm repeats: code that catches `BaseException` once is interrupted again.
    start = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, ring)
    previous_alarm, previous_interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        try:
            result = call()
        finally:
            is_armed = False  # an alarm that fires from here on is ignored
        if has_rung:
            raise TimeIsUp(message)
        return result
    finally:
        # The timer stops before its handler is removed: an alarm without a handler would end the process.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if previous_handler is None else previous_handler)

        # A process has one such timer. One that was set before continues with what is left of its time; 0 would
        # disarm it, so an alarm that is due fires after a millisecond.
        if previous_alarm:
            left = previous_alarm - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), previous_interval)
