"""Errors of a run in an interactive session: with the user's frames only, and without keeping models in memory.

IPython keeps the last error, and its frames have the policy, the optimizer and the texts as variables. The frames of
libraries are therefore cleared, and IPython shows an error without them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rl4lms_like.system.errors import RL4LMsLikeError

Method = TypeVar("Method", bound=Callable[..., Any])

PACKAGE = str(Path(__file__).parents[1])


def is_interactive() -> bool:
    """Return True in a notebook, in IPython and at Python's prompt."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def with_short_errors(method: Method) -> Method:
    """Decorate a method of `Run` so that its errors are short in an interactive session.

    This is no context manager of contextlib, which would restore the traceback of an error that it raises again.
    """

    @functools.wraps(method)
    def short(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not is_interactive():
                raise
            is_saved = method.__name__ == "train" and self.folder is not None
            shortened = _shortened(error, is_saved=is_saved)

        # Raised here, after the block, so that it has no context.
        raise shortened

    return short  # type: ignore[return-value]


def _shortened(error: BaseException, *, is_saved: bool) -> BaseException:
    """Clear the library's frames of an error and of those that led to it; return it with the user's frames only.

    Args:
        error: the error.
        is_saved: an interruption has saved the run.
    """
    _clear_frames(error)
    if isinstance(error, KeyboardInterrupt):
        text = "the run was interrupted and saved; train() continues it"
        return KeyboardInterrupt(text) if is_saved else KeyboardInterrupt()
    if not isinstance(error, RL4LMsLikeError):
        return error

    # The error of a component has that of the user's function as its cause.
    cause = error.__cause__
    if cause is not None:
        cause.__traceback__ = _of_user(cause.__traceback__)
        cause.__context__ = None
        if cause.__traceback__ is None:
            error.__cause__ = None
    error.__suppress_context__ = True
    error.__traceback__ = None

    # IPython asks an error for its traceback, which by then has the frames that lead to the cell, and ours.
    error._render_traceback_ = functools.partial(_rendered, error)  # type: ignore[attr-defined]
    return error


def _rendered(error: BaseException) -> list[str]:
    """Return the lines that IPython shows of an error."""
    import IPython

    traceback = _of_user(error.__traceback__)
    shell = IPython.get_ipython()
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, traceback, tb_offset=0)
    return lines


def _is_library(traceback: TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(PACKAGE) or "site-packages" in file or file.startswith("<frozen")


def _of_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of libraries."""
    if traceback is None:
        return None
    rest = _of_user(traceback.tb_next)
    if _is_library(traceback):
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def _clear_frames(error: BaseException) -> None:
    """Clear the variables of the library's frames, of an error and of all that led to it."""
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        current = errors.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        errors += [current.__cause__, current.__context__]

        traceback = current.__traceback__
        while traceback is not None:
            # Not a frame that still runs, such as that of the decorated method's caller.
            if _is_library(traceback):
                with suppress(RuntimeError):
                    traceback.tb_frame.clear()
            traceback = traceback.tb_next
