"""Errors of a run in an interactive session: with the user's frames only, and without keeping models in memory.

IPython keeps the last error, and its frames have the policy, the optimizer and the texts as variables. The frames of
libraries are therefore cleared, and those that lead to the user's function are left out.
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
        __tracebackhide__ = True  # of IPython
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not is_interactive():
                raise
            shortened = _shortened(error)

        # Raised here, after the block, so that it has no context.
        raise shortened

    return short  # type: ignore[return-value]


def _shortened(error: BaseException) -> BaseException:
    """Clear the library's frames of an error and of those that led to it; return it with the user's frames only."""
    _clear_frames(error)
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt("the run was interrupted and saved; train() continues it")
    if not isinstance(error, RL4LMsLikeError):
        return error

    # The error of a component has that of the user's function as its cause, which is shown from the function on.
    cause = error.__cause__
    if cause is not None:
        cause.__traceback__ = _from_user(cause.__traceback__)
        cause.__context__ = None
        if cause.__traceback__ is None:
            error.__cause__ = None
    error.__suppress_context__ = True
    return error.with_traceback(None)


def _is_library(traceback: TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(PACKAGE) or "site-packages" in file or file.startswith("<frozen")


def _from_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback from the first frame of the user's code on."""
    while traceback is not None and _is_library(traceback):
        traceback = traceback.tb_next
    return traceback


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
