"""Event loop in a background thread, for components that wait for servers or for async functions.

    caller's thread                 background thread
    run(work)  ── coroutine ──>     awaits it; the loop exists as long as the component
               <── result ─────     an interrupt in the caller cancels the work

Objects kept between calls (a client, a semaphore) stay usable, and the caller may itself run inside an event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 1.0
"""Seconds before a cancelled task that is still running is cancelled again."""


class EventLoop:
    """Event loop for synchronous callers; its thread starts at the first call, separately in each process.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of the coroutine; its exceptions are raised here."""
        # A forked process has a copy of the loop, but not the thread that runs it: work given to it would never end.
        if self._loop is None or self._process != os.getpid():
            self._loop = asyncio.new_event_loop()
            self._process = os.getpid()
            threading.Thread(target=_serve, args=(self._loop,), name=self.name, daemon=True).start()

        # Ctrl-C interrupts the waiting here, not the work in the other thread, which is therefore cancelled.
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the event loop, which cannot be pickled."""
        return self.__dict__ | {"_loop": None}

    def __del__(self) -> None:
        if self._loop is None or sys.is_finalizing():  # at the end of the process asyncio no longer works
            return
        # Not in a forked process, whose copy of the loop no thread runs.
        if self._process == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)


async def gathered(calls: Sequence[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Return the results of all calls, in order; the first failure cancels the others.

    Args:
        calls: functions that each return an awaitable.
        at_once: maximum number of concurrent calls.
    """
    slots = asyncio.Semaphore(at_once)

    async def limited(call: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await call()

    tasks = [asyncio.ensure_future(limited(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # `asyncio.gather` raises the first failure and leaves the other tasks running. They are cancelled repeatedly:
        # before Python 3.12, `wait_for` drops a cancellation if its work has just finished.
        while unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished, timeout=_PATIENCE_S)

        # Their exceptions are read, or asyncio would report each as never retrieved.
        await asyncio.gather(*tasks, return_exceptions=True)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop in the background thread until it is stopped."""
    try:
        while True:
            try:
                loop.run_forever()
            except (KeyboardInterrupt, SystemExit):  # already stored in the caller's future; other work continues
                continue
            break
    finally:
        loop.close()
