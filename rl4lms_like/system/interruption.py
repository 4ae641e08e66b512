"""Handling of Ctrl-C, SIGTERM and SIGHUP: a signal is deferred until a run can stop without losing work.

    signal    in a rollout, an evaluation     in a minibatch, a checkpoint, a log
    first     stops immediately               stops once that is finished
    second    stops immediately, and nothing more is saved

With several processes, each of which may receive the signal at another moment, they agree at the next check where to
stop; nothing stops immediately at the first signal.

When a terminal closes, the shell and the system each send SIGHUP, so a SIGHUP never counts as a second signal.

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
    from rl4lms_like.system.ranks import Ranks

_STDERR = 2

STOP_SIGNALS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that stop a run; Windows has no SIGHUP."""


class Interruption:
    """Context manager that handles `STOP_SIGNALS` in the main thread; in other threads it has no effect.

    A signal that is ignored stays ignored: SIGINT in a shell's background jobs, SIGHUP with `nohup`.

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
        self._handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self.requests = 0

        # Python allows handlers to be set in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for signal_number in STOP_SIGNALS:
                handler = signal.getsignal(signal_number)
                if handler not in (signal.SIG_IGN, None):  # None: a handler not installed from Python
                    self._handlers_before[signal_number] = handler
                    signal.signal(signal_number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._handlers_before:
            signal.signal(*self._handlers_before.popitem())
        self.requests = 0

    @contextmanager
    def at_any_moment(self) -> Iterator[None]:
        """Let the first signal stop this block immediately; the lost work is recomputed from the state before it.

        Raises:
            KeyboardInterrupt: a signal arrived before or within the block.
        """
        # The flag is set before the check: a signal between the two would else be deferred to the end of the block.
        self._at_any_moment = True
        try:
            self.check()
            yield
        finally:
            self._at_any_moment = False

    @contextmanager
    def finishing(self, task: str) -> Iterator[None]:
        """Name the task (`this minibatch`) that the message for a first signal announces to finish."""
        task_before = self._task
        self._task = task
        try:
            yield
        finally:
            self._task = task_before

    def check(self) -> None:
        """Stop here if a signal has arrived, in any process.

        Raises:
            KeyboardInterrupt: a signal has arrived.
        """
        # `any` is collective: all processes call it, or the one that received the signal would wait for the others.
        is_requested = self.requests > 0
        if self._ranks is not None:
            is_requested = self._ranks.any(is_requested)
        if is_requested:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Repeated by a closing terminal: the state must still be saved.
        if self.requests and number == getattr(signal, "SIGHUP", None):
            return

        # One of several processes that stopped here would leave the others waiting in their next exchange.
        self.requests += 1
        is_alone = self._ranks is None or self._ranks.size == 1
        if (self._at_any_moment and is_alone) or self.requests > 1:
            raise KeyboardInterrupt

        # Not to sys.stderr: the signal may have interrupted one of its writes. stderr itself may be closed, since the
        # same Ctrl-C also ends `| tee`.
        if self._ranks is None or self._ranks.is_main:
            message = f"\nstopping once {self._task} is done; press Ctrl-C again to stop immediately without saving\n"
            with suppress(OSError):
                os.write(_STDERR, message.encode())
