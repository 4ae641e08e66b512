"""Command-line interface `rl4lms-like`.

    train CONFIG           check CONFIG          quickstart
    evaluate RUN_OR_MODEL  generate MODEL TEXT   report RUN_FOLDER
    list rewards           show ID
    benchmark SPEC         compare A B           env

Exit status: 0 success, 1 a run failed (the message gives the reason), 2 mistakes in the config or the command line,
130 interrupted. Commands import heavy modules when they run.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rl4lms_like.cli.commands import COMMANDS
from rl4lms_like.cli.options import build_parser
from rl4lms_like.core.disk import is_denied, reason
from rl4lms_like.core.errors import ConfigError, RL4LMsLikeError
from rl4lms_like.core.import_paths import use_code_from
from rl4lms_like.core.secrets import without_secrets
from rl4lms_like.core.wording import printable, take_any_letter
from rl4lms_like.rewards.time_limit import TimeIsUp


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # started as a program, so no caller catches errors
        for stream in ("stdout", "stderr"):
            if getattr(sys, stream) is None:  # closed: a file opened later would get its descriptor
                setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the program runs)
            take_any_letter(getattr(sys, stream))
        sys.excepthook = lambda kind, error, place: _say("".join(traceback.format_exception(kind, error, place)))
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "quickstart":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    status = 0
    try:
        use_code_from(*getattr(options, "code", ()))
        with _cancelled_as_by_ctrl_c():
            status = int(COMMANDS[options.command](options))
        sys.stdout.flush()
        return status
    except RL4LMsLikeError as error:
        _say(traceback.format_exc() if options.traceback else f"{error}\n")
        if argv is None and isinstance(error.__cause__, TimeIsUp):
            _end_despite_threads()
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        if argv is None:
            _end_at_once_by_another()
        _say("interrupted\n")
        return 130
    except BrokenPipeError as error:
        if not _is_stdout_gone():
            return _unexpected(error, options)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (`| head`) has closed the pipe
        return status
    except Exception as error:
        if _is_ours(error):
            raise
        return _unexpected(error, options)


def _say(message: str) -> None:
    """Print a message to standard error, without secrets and terminal control characters.

    If the stream is closed (Ctrl-C also ends `| tee`), output is discarded, so that the exit status is kept.
    """
    try:
        sys.stderr.write(printable(without_secrets(message)))
        sys.stderr.flush()
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)


def _end_at_once_by_another() -> None:
    """Exit at once with status 130 on another signal, because nothing is left to save."""
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: os._exit(130))


def _end_despite_threads() -> None:
    """Exit without waiting for a reward's hanging threads (`ThreadPoolExecutor`), which Python would join."""
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(1)


def _is_ours(error: Exception) -> bool:
    """Return True for a bug of this library, whose traceback is shown in full for a bug report."""
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    return not isinstance(error, OSError | MemoryError) and Path(__file__).parents[1] in Path(place).parents


def _unexpected(error: Exception, options: argparse.Namespace) -> int:
    """Report an unexpected error of another library or the system; return the exit status."""
    said = reason(error) if isinstance(error, OSError) else error
    if is_denied(error) and not options.traceback:
        _say(f"{said}\n")
        return 1
    where = "for a traceback, see log.txt of the run, or use the same command with --traceback"
    _say(traceback.format_exc() if options.traceback else f"{type(error).__name__}: {said}\n{where}\n")
    return 1


def _is_stdout_gone() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    with suppress(io.UnsupportedOperation, AttributeError):  # Windows has no `poll`
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # mask 0 reports errors only; needed for unbuffered output
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


@contextmanager
def _cancelled_as_by_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM, sent to cancelled jobs, like Ctrl-C within the context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
