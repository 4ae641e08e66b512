"""How long a reward may take in the process that trains.

    within(30, call)        SIGALRM after 30 s raises `TimeIsUp` out of Python code, sleep and sockets

What holds Python's lock in C code cannot be left in this way, nor what catches `BaseException` in a loop, nor a thread
but the main one, nor Windows; processes of their own can be ended anywhere (`env.reward_workers`). Other signals are
left alone, an alarm of others is put off.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from rl4lms_like.core.errors import ConfigError, Mistake

T = TypeVar("T")


class TimeIsUp(BaseException):
    """A reward took too long; no `Exception`, so that a reward's own `except Exception` does not keep it."""


def check_time_limit(seconds: float | None) -> None:
    """Whether this thread can end a call after so many seconds.

    Raises:
        ConfigError: it cannot; says what can.
    """
    if seconds is None:
        return
    if not hasattr(signal, "setitimer"):
        why = "this system has no SIGALRM"
    elif threading.current_thread() is not threading.main_thread():
        why = "only the main thread hears of SIGALRM"
    else:
        return
    said = f"a reward in this process cannot be ended: {why}; set env.reward_workers to 1"
    raise ConfigError([Mistake("env.reward_timeout", said)])


def within(seconds: float | None, call: Callable[[], T]) -> T:
    """The result of a call that is left after so many seconds, and again after as many, should it keep that to itself.

    What it returns nevertheless, from an `except` that takes everything, does not count.

    Args:
        seconds: None for ever.
        call: what takes its time.

    Raises:
        TimeIsUp: it was not done.
        ConfigError: this thread cannot end it; see `check_time_limit`.
    """
    if seconds is None:
        return call()
    check_time_limit(seconds)
    is_armed, has_rung = True, False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal has_rung
        if is_armed:
            has_rung = True
            raise TimeIsUp(said)

    said = f"not done within {seconds:g} s (env.reward_timeout)"
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        try:
            result = call()
        finally:
            is_armed = False  # an alarm that is under way already finds it so
        if has_rung:
            raise TimeIsUp(said)
        return result
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)
