"""Handling of Ctrl-C and SIGTERM: a signal is deferred until a run can stop without losing work.

    signal    in a rollout, an evaluation     in a minibatch, a checkpoint, a log
    first     stops immediately               stops once that is finished
    second    stops immediately, and nothing more is saved

With several processes, each of which may receive the signal at another moment, they agree at the next check where to
stop; nothing stops immediately at the first signal.

A run stops with `KeyboardInterrupt`, as usual in Python. The function that runs the loop saves the run and re-raises.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl4lms_like.core.ranks import Ranks

_STDERR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Context manager that handles SIGINT and SIGTERM in the main thread; in other threads it has no effect.

    A signal that is ignored, as in a shell's background jobs, stays ignored.

    Args:
        ranks: the processes of the run, which call `check` equally often; default: this one alone.

    Attributes:
        requests: number of signals received so far.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.requests = 0
        self._ranks = ranks
        self._at_any_moment = False
        self._task = "this iteration"
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self.requests = 0
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                before = signal.getsignal(each)
                if before not in (signal.SIG_IGN, None):  # None: a handler not installed from Python
                    self._before[each] = before
                    signal.signal(each, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        self.requests = 0

    @contextmanager
    def at_any_moment(self) -> Iterator[None]:
        """Let the first signal stop this block immediately; the lost work is recomputed from the state before it.

        Raises:
            KeyboardInterrupt: a signal arrived before or within the block.
        """
        self._at_any_moment = True
        try:
            self.check()
            yield
        finally:
            self._at_any_moment = False

    @contextmanager
    def finishing(self, task: str) -> Iterator[None]:
        """Name the task (`this minibatch`) that the message for a first signal announces to finish."""
        before, self._task = self._task, task
        try:
            yield
        finally:
            self._task = before

    def check(self) -> None:
        """Stop here if a signal has arrived, in any process.

        Raises:
            KeyboardInterrupt: a signal has arrived.
        """
        if self.requests if self._ranks is None else self._ranks.any(bool(self.requests)):
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1
        is_alone = self._ranks is None or self._ranks.size == 1
        if (self._at_any_moment and is_alone) or self.requests > 1:
            raise KeyboardInterrupt
        if self._ranks is not None and not self._ranks.is_main:
            return
        message = f"\nstopping once {self._task} is done; press Ctrl-C again to stop immediately without saving\n"
        with suppress(OSError):  # stderr may be closed: the same Ctrl-C also ends `| tee`
            os.write(_STDERR, message.encode())  # not sys.stderr: the signal may have interrupted one of its writes
