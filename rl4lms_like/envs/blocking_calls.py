"""Calls of users' code that may wait or never return: one after the other, in threads, within a time limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any


class StillRunning(Exception):  # noqa: N818  (stands for the result of a call, it is not raised here)
    """A call was not done within its time limit; its thread goes on until the process ends."""


@dataclass(frozen=True)
class Outcome:
    """Result of a call, or the exception that it raised."""

    result: Any = None
    error: BaseException | None = None


def outcomes(calls: Sequence[Callable[[], Any]], n_threads: int = 0, timeout: float | None = None) -> list[Outcome]:
    """Return the outcome of each call, in their order.

    After a failure no further call is started: the outcomes up to the first failed one are returned.

    Args:
        calls: functions without arguments.
        n_threads: number of calls that run at the same time; 0 makes them in this thread, unless there is a time limit.
        timeout: time limit of a call in seconds. None for no limit.

    Raises:
        KeyboardInterrupt: in a call, or in this thread.
    """
    if not n_threads and timeout is None:
        results = []
        for call in calls:
            results.append(_outcome(call))
            if results[-1].error is not None:
                break
        return results
    return _in_threads(calls, max(n_threads, 1), timeout)


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(result=call())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # users' code may also exit
        return Outcome(error=error)


def _in_threads(calls: Sequence[Callable[[], Any]], n_threads: int, timeout: float | None) -> list[Outcome]:
    """Make the calls in threads that do not keep the process alive: one that blocks cannot be stopped."""
    waiting = deque(enumerate(calls))
    started: dict[int, float] = {}  # index of a running call -> seconds of the monotonic clock
    done: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                index, call = waiting.popleft()
            except IndexError:
                return
            started[index] = time.monotonic()
            try:
                outcome = _outcome(call)
            except KeyboardInterrupt as error:  # raised by the call itself: signals reach the main thread only
                outcome = Outcome(error=error)
            done.put((index, outcome))

    for _ in range(min(n_threads, len(calls))):
        threading.Thread(target=work, daemon=True).start()

    results: dict[int, Outcome] = {}
    while len(results) < len(calls):
        try:
            index, outcome = done.get(timeout=None if timeout is None else min(timeout / 4, 1.0))
            results[index] = outcome
        except Empty:
            pass

        # Late ones count as failed. The first failure in the order of the calls is reported, not the first in time, as
        # far as that is known by then.
        for index in set(started) - set(results):
            if timeout is not None and time.monotonic() - started[index] > timeout:
                results[index] = Outcome(error=StillRunning())
        if any(outcome.error is not None for outcome in results.values()):
            waiting.clear()
            failed = min(index for index, outcome in results.items() if outcome.error is not None)
            return [results.get(index, Outcome()) for index in range(failed + 1)]
    return [results[index] for index in range(len(calls))]
