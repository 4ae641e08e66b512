"""Command-line interface `rl4lms-like`.

    train CONFIG           check CONFIG          quickstart
    evaluate RUN_OR_MODEL  generate MODEL TEXT   report RUN_FOLDER
    merge RUN OUT          push RUN REPO
    list rewards           show ID
    benchmark SPEC         compare A B           rollouts RUN_FOLDER
    pairs CONFIG           env                   post-train --config FILE
    pretrain-critic CONFIG serve-reward MODEL    play ENV

Exit status: 0 success, 1 a run failed (the message gives the reason), 2 errors in the config or the command line,
130 interrupted. Commands import heavy modules when they run.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rl4lms_like.cli.commands import COMMANDS, build_parser
from rl4lms_like.cli.printing import say
from rl4lms_like.rewards.time_limit import TimeIsUp
from rl4lms_like.system.disk import is_denied, reason
from rl4lms_like.system.errors import ConfigError, RankError, RL4LMsLikeError
from rl4lms_like.system.import_paths import use_code_from
from rl4lms_like.system.interruption import STOP_SIGNALS
from rl4lms_like.system.ranks import is_main_process
from rl4lms_like.system.wording import accept_any_character

_WITH_LOG = ("train", "quickstart", "post-train")
"""Commands that write a run folder, with its log."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing to a device that has no space left, or takes no more."""
TIME_TO_REPORT_S = 5.0
"""Time for the main process of several to report an error that all of them have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    # Called from Python, only the command runs: streams, signals and threads are the caller's.
    is_program = argv is None
    if is_program:
        _prepare_streams()

    parser = build_parser()
    options, unknown = parser.parse_known_args(None if argv is None else list(argv))
    if unknown and options.command != "quickstart":  # which has a parser of its own
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.unknown = unknown

    status = 0
    try:
        use_code_from(*options.code)
        with _cancelled_as_by_ctrl_c():
            status = COMMANDS[options.command].run(options) or 0
        sys.stdout.flush()
        return status

    # Errors that are meant for users: their message is enough.
    except RL4LMsLikeError as error:
        _report_error(error, options)
        if is_program and _has_hung(error):
            _end_despite_threads()
        return 2 if isinstance(error, ConfigError) else 1

    # The run has saved its state before the interrupt arrives here; 130 is what shells expect (128 + SIGINT).
    except KeyboardInterrupt:
        if is_program:
            _end_at_once_by_another()
        if is_main_process():
            say("interrupted\n")
        return 130

    # The reader of standard output (`| head`) has closed the pipe, which is no error. Python would report one when it
    # flushes the stream at its exit, so the stream is redirected.
    except BrokenPipeError as error:
        if not _is_stdout_gone():
            return _unexpected(error, options)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status

    except Exception as error:
        # The test writes a line, so it is made only for errors that a full device raises.
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL and _is_stdout_full():
            say(f"cannot write to standard output: {reason(error)}\n")
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at its exit
            return 1
        if _is_ours(error):
            raise
        return _unexpected(error, options)


def _prepare_streams() -> None:
    """Prepare standard output and error of a program, in which no caller catches errors."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: a file opened later would get its descriptor
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the program runs)
        accept_any_character(getattr(sys, name))

    # The traceback of a bug may hold secrets, too.
    sys.excepthook = lambda kind, error, trace: say("".join(traceback.format_exception(kind, error, trace)))


def _report_error(error: RL4LMsLikeError, options: argparse.Namespace) -> None:
    # These errors occur in all of several processes. Only the main one reports them; the others wait for it, because
    # torchrun ends all processes as soon as one has ended.
    if not is_main_process() and isinstance(error, ConfigError | RankError):
        time.sleep(TIME_TO_REPORT_S)
    else:
        say(traceback.format_exc() if options.traceback else f"{error}\n")


def _end_at_once_by_another() -> None:
    """Exit at once with status 130 on another signal, because nothing is left to save."""
    for signal_number in STOP_SIGNALS:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, lambda number, frame: os._exit(130))


def _has_hung(error: BaseException | None) -> bool:
    """Return whether a time limit is the cause of an error, also within that of a metric."""
    while error is not None and not isinstance(error, TimeIsUp):
        error = error.__cause__
    return error is not None


def _end_despite_threads() -> None:
    """Exit without waiting for a reward's hanging threads (`ThreadPoolExecutor`), which Python would join."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if all(thread.daemon for thread in threads):
        return

    # `os._exit` skips what Python does at its exit, such as writing the streams' buffers.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(1)


def _is_ours(error: Exception) -> bool:
    """Return True for a bug of this library, whose traceback is shown in full for a bug report."""
    # Where it was raised. Errors of files and memory are the system's, wherever in the library they occur.
    if isinstance(error, OSError | MemoryError):
        return False
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return Path(__file__).parents[1] in file.parents


def _unexpected(error: Exception, options: argparse.Namespace) -> int:
    """Report an unexpected error of another library or the system; return the exit status."""
    message = reason(error) if isinstance(error, OSError) else error
    log = "see log.txt of the run, or " if options.command in _WITH_LOG else ""
    hint = f"for a traceback, {log}use the same command with --traceback"
    if options.traceback:
        say(traceback.format_exc())
    elif is_denied(error):  # the message says what to do; a traceback would not help
        say(f"{message}\n")
    else:
        say(f"{type(error).__name__}: {message}\n{hint}\n")
    return 1


def _is_stdout_gone() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True

    # Unbuffered output leaves nothing to flush. A mask of 0 asks for errors only; Windows has no `poll`.
    with suppress(io.UnsupportedOperation, AttributeError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def _is_stdout_full() -> bool:
    """Return whether nothing can be written to standard output, for instance because its disk is full."""
    # What could not be written is no longer in the buffer: only another line shows it.
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


@contextmanager
def _cancelled_as_by_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM, sent to cancelled jobs, and SIGHUP, sent by a closing terminal, like Ctrl-C within the context.

    A SIGHUP that is ignored (`nohup`) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in that thread only
        yield
        return

    handlers_before = {signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler)}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        handlers_before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _hang_up)

    # None: the handler before was not installed from Python, which cannot restore it.
    try:
        yield
    finally:
        for signal_number, handler in handlers_before.items():
            signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)


def _hang_up(number: int, frame: FrameType | None) -> None:
    # Both the shell and the system send SIGHUP when a terminal closes: only the first one counts.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
