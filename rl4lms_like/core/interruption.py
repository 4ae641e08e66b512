"""Ctrl-C and SIGTERM, kept until a run can stop without loss.

    signal    in a rollout, an evaluation     in a minibatch, a checkpoint, a log
    first     stops it at once                stops the run once that is done
    second    stops it at once, and nothing more is saved

To stop is to raise `KeyboardInterrupt`, as Python does; whoever runs the loop saves and passes it on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

_STDERR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Listens to SIGINT and SIGTERM while it is entered, in the main thread; elsewhere it never hears anything.

    A signal that is ignored, as in a shell's background jobs, stays ignored.

    Attributes:
        requests: signals so far.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._at_any_moment = False
        self._task = "this iteration"
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self.requests = 0
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                before = signal.getsignal(each)
                if before not in (signal.SIG_IGN, None):  # None: a handler that Python does not know
                    self._before[each] = before
                    signal.signal(each, self._heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        self.requests = 0

    @contextmanager
    def at_any_moment(self) -> Iterator[None]:
        """Within, a first signal stops at once: what is lost is done again from what was before.

        Raises:
            KeyboardInterrupt: there was one already, or there is one.
        """
        self._at_any_moment = True
        try:
            self.check()
            yield
        finally:
            self._at_any_moment = False

    @contextmanager
    def finishing(self, task: str) -> Iterator[None]:
        """Within, who asks is told that `task` is finished first: `this minibatch`."""
        before, self._task = self._task, task
        try:
            yield
        finally:
            self._task = before

    def check(self) -> None:
        """Here the run may stop.

        Raises:
            KeyboardInterrupt: there was a signal.
        """
        if self.requests:
            raise KeyboardInterrupt

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1
        if self._at_any_moment or self.requests > 1:
            raise KeyboardInterrupt
        said = f"\nstopping once {self._task} is done; another Ctrl-C stops at once, and saves nothing\n"
        with suppress(OSError):  # nobody is there to read it, as where Ctrl-C ended `| tee` too
            os.write(_STDERR, said.encode())  # a stream may be in the midst of a write
