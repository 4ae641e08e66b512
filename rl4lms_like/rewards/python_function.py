"""Reward from any Python function, sync or async, called once per batch or once per text.

async def judge(*, prompt, response, references, meta_info, **kwargs) -> float        batched: false

      scores ── texts ──> `EventLoop` ── at most max_concurrency at a time ──> numbers, in order
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from rl4lms_like.core.event_loop import EventLoop, gathered
from rl4lms_like.core.import_paths import ImportPath, RefusedImportError, imported
from rl4lms_like.core.numbers import Count, Positive
from rl4lms_like.core.wording import beginning, raised
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.score import Texts

T = TypeVar("T")

_OF_ALL = ("prompts", "responses", "references", "meta_infos")
_OF_ONE = ("prompt", "response", "references", "meta_info")  # names of the keyword arguments passed to a function


@dataclass(eq=False, repr=False)  # `kwargs` may contain secrets
class PythonReward(TextReward):
    """Return value of a Python function, given by its import path.

    With `batched`, it is called as `function(prompts=..., responses=..., references=..., meta_infos=..., **kwargs)` and
    returns one number per response. Otherwise it is called as `function(prompt=..., response=..., references=...,
    meta_info=..., **kwargs)` for each finished response and returns a number. Either form may be `async`.

    Args:
        function: `package.module:name`, in an installed package or in a folder given by `--code`.
        batched: one call for all texts; false: one call per text.
        kwargs: additional keyword arguments.
        max_concurrency: maximum number of concurrent calls of an async function that is not batched.
        timeout_s: time limit of one call in seconds; default: none. A synchronous function keeps running in its thread
            after the timeout; its result is discarded.
    """

    function: ImportPath
    batched: bool = True
    kwargs: dict[str, Any] | None = None
    max_concurrency: Count = 16
    timeout_s: Positive | None = None

    def __post_init__(self) -> None:
        self._kwargs = dict(self.kwargs or {})
        self._loop = EventLoop(self.__name__)
        found = imported_function(self.function)
        _check_signature(found, self.function, _OF_ALL if self.batched else _OF_ONE, self._kwargs)

    @property
    def __name__(self) -> str:
        """Name in error messages."""
        return f"the function {self.function!r}"

    def scores(self, texts: Texts) -> Sequence[float]:
        """Return the results of the function."""
        function = _loaded(self.function)
        if self.batched:
            named = dict(zip(_OF_ALL, texts, strict=True))
            found: Sequence[float] = self._one(partial(function, **named, **self._kwargs))
            return found
        rows = [dict(zip(_OF_ONE, row, strict=True)) for row in zip(*texts, strict=True)]
        calls = [partial(function, **row, **self._kwargs) for row in rows]
        if inspect.iscoroutinefunction(_unwrapped(function)):
            waits = [partial(self._named, call, place, texts.responses[place]) for place, call in enumerate(calls)]
            return self._loop.run(gathered(waits, self.max_concurrency))
        found = []
        for place, call in enumerate(calls):
            try:
                found.append(self._one(call))
            except Exception as error:
                raise _failed_on(error, place, texts.responses[place]) from error
        return found

    def _one(self, call: Callable[[], Any]) -> Any:
        """Call a sync or async function; an awaitable result is awaited."""
        result = self._timed(call)
        return self._loop.run(self._awaited(result)) if inspect.isawaitable(result) else result

    async def _awaited(self, result: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(result, self.timeout_s)
        except asyncio.TimeoutError as error:
            if not isinstance(error.__cause__, asyncio.CancelledError):  # raised by the function itself
                raise
            raise TimeoutError(f"no answer within {self.timeout_s:g} s") from error

    async def _named(self, call: Callable[[], Awaitable[T]], place: int, text: str) -> T:
        try:
            return await self._awaited(call())
        except Exception as error:
            raise _failed_on(error, place, text) from error

    def _timed(self, call: Callable[[], T]) -> T:
        """Call a synchronous function and raise `TimeoutError` after `timeout_s`."""
        if self.timeout_s is None or inspect.iscoroutinefunction(_unwrapped(call)):
            return call()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        # A daemon thread, unlike those of an executor, does not keep the process alive after a timeout.
        threading.Thread(target=run, name=self.__name__, daemon=True).start()
        if not wait([future], self.timeout_s).done:
            raise TimeoutError(f"no answer within {self.timeout_s:g} s")
        return future.result()


def imported_function(path: str) -> Callable[..., Any]:
    """Import a function; a `ValueError` if there is none at the path, or configs are not allowed to select it."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"function: expected an import path 'package.module:name', got {path!r}")
    try:
        found = imported(path)
    except RefusedImportError as error:
        raise ValueError(f"function: {path!r} is refused: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing a user's module runs the user's code, which may exit
        raise ValueError(f"function: cannot import {path!r}: {raised(error)}") from error
    if not callable(found):
        raise ValueError(f"function: {path!r} is {found!r}, which cannot be called")
    function: Callable[..., Any] = found
    return function


def _loaded(path: str) -> Callable[..., Any]:
    """Return a function that was validated before, possibly in the parent process of this one."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = attrgetter(name)(importlib.import_module(module))
    return function


def _check_signature(function: Callable[..., Any], path: str, texts: Collection[str], kwargs: Collection[str]) -> None:
    """Raise a `ValueError` unless the function can be called with these names and names a response parameter.

    `**kwargs` alone is no sign of a reward.
    """
    names = {*texts, *kwargs}
    response = next(name for name in texts if name.startswith("response"))
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(f"function: {path!r} cannot be called with {', '.join(sorted(names))}: {error}") from error
    except ValueError:  # some built-in functions have no signature
        signature = inspect.Signature()
    if response not in signature.parameters:
        raise ValueError(f"function: {path!r} has no parameter {response!r}, so it cannot score responses")


def _unwrapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside nested partials; for a callable object, its `__call__`."""
    while isinstance(call, partial):
        call = call.func
    return call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004


def _failed_on(error: Exception, place: int, text: str) -> Exception:
    return ValueError(f"on text {place}, {beginning(text)}: {type(error).__name__}: {error}")
