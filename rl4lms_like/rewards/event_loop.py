"""An event loop beside the training loop, for rewards that wait: for servers, for functions that are async.

    caller's thread                 thread of its own
    run(work)  ── coroutine ──>     awaits, as long as the reward lives
               <── result ─────     an interrupt of the caller ends the work

What work keeps between calls (a client, a semaphore) stays usable, and the caller may be inside another loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 1.0
"""Until work that was cancelled is cancelled again."""


class EventLoop:
    """Runs coroutines of threads that have no loop of their own; starts at the first, in each process anew.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine; what it raises is raised here."""
        if self._loop is None or self._process != os.getpid():  # a thread does not follow into a forked process
            self._loop, self._process = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_serve, args=(self._loop,), name=self.name, daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """All but the loop."""
        return self.__dict__ | {"_loop": None}

    def __del__(self) -> None:
        if self._loop is not None and self._process == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)


async def gathered(calls: Sequence[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """The results of all calls, in their order; the first that fails ends the others.

    Args:
        calls: each makes something to wait for.
        at_once: how many are waited for at the same time.
    """
    free = asyncio.Semaphore(at_once)

    async def one(call: Callable[[], Awaitable[T]]) -> T:
        async with free:
            return await call()

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        while left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()  # again: before Python 3.12 `wait_for` forgets it where its work was just done
            await asyncio.wait(left, timeout=_PATIENCE_S)
        await asyncio.gather(*tasks, return_exceptions=True)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        while True:
            try:
                loop.run_forever()
            except (KeyboardInterrupt, SystemExit):  # of the work, and told to whoever waits for it; others do too
                continue
            break
    finally:
        loop.close()
