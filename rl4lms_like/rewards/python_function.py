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

from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.event_loop import EventLoop, gathered
from rl4lms_like.system.import_paths import ImportPath, RefusedImportError, imported
from rl4lms_like.system.numbers import Count, Positive
from rl4lms_like.system.wording import beginning, raised

T = TypeVar("T")

# Names of the keyword arguments that a function gets, in the order of the columns of `Texts`.
_BATCHED_NAMES = ("prompts", "responses", "references", "meta_infos")
_SINGLE_NAMES = ("prompt", "response", "references", "meta_info")


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

        # Only checked here, not kept: the reward may be pickled and sent to a worker, which imports its own function.
        names = _BATCHED_NAMES if self.batched else _SINGLE_NAMES
        _check_signature(imported_function(self.function), self.function, names, self._kwargs)

    @property
    def __name__(self) -> str:
        """Name in error messages."""
        return f"the function {self.function!r}"

    def scores(self, texts: Texts) -> Sequence[float]:
        """Return the results of the function."""
        function = _loaded(self.function)
        if self.batched:
            columns = dict(zip(_BATCHED_NAMES, texts, strict=True))
            batch_scores: Sequence[float] = self._call(partial(function, **columns, **self._kwargs))
            return batch_scores

        calls = []
        for row in zip(*texts, strict=True):
            arguments = dict(zip(_SINGLE_NAMES, row, strict=True))
            calls.append(partial(function, **arguments, **self._kwargs))

        # An async function waits for many answers at once; the scores come in the order of the texts all the same.
        if inspect.iscoroutinefunction(_unwrapped(function)):
            waiting = []
            for index, call in enumerate(calls):
                waiting.append(partial(self._awaited_for_text, call, index, texts.responses[index]))
            return self._loop.run(gathered(waiting, self.max_concurrency))

        scores = []
        for index, call in enumerate(calls):
            try:
                scores.append(self._call(call))
            except Exception as error:
                raise _failed_on(error, index, texts.responses[index]) from error
        return scores

    def _call(self, call: Callable[[], Any]) -> Any:
        """Call a sync or async function; an awaitable result is awaited."""
        result = self._timed(call)
        return self._loop.run(self._awaited(result)) if inspect.isawaitable(result) else result

    async def _awaited(self, result: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(result, self.timeout_s)
        except asyncio.TimeoutError as error:
            # `wait_for` raises from the cancellation of the work; without it, the function raised the error itself.
            if not isinstance(error.__cause__, asyncio.CancelledError):
                raise
            raise TimeoutError(f"no answer within {self.timeout_s:g} s") from error

    async def _awaited_for_text(self, call: Callable[[], Awaitable[T]], index: int, text: str) -> T:
        try:
            return await self._awaited(call())
        except Exception as error:
            raise _failed_on(error, index, text) from error

    def _timed(self, call: Callable[[], T]) -> T:
        """Call a synchronous function and raise `TimeoutError` after `timeout_s`."""
        # The call of an async function only makes its coroutine; the time of the work is limited by `_awaited`.
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

    # `BaseException`, because importing a user's module runs the user's code, which may call `sys.exit`.
    try:
        function: Callable[..., Any] = imported(path)
    except RefusedImportError as error:
        raise ValueError(f"function: {path!r} is refused: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"function: cannot import {path!r}: {raised(error)}") from error

    if not callable(function):
        raise ValueError(f"function: {path!r} is {function!r}, which cannot be called")
    return function


def _loaded(path: str) -> Callable[..., Any]:
    """Return a function that was validated before, possibly in the parent process of this one."""
    module, _, name = path.partition(":")
    # `attrgetter` follows dots: `module:Class.method` is a valid path.
    function: Callable[..., Any] = attrgetter(name)(importlib.import_module(module))
    return function


def _check_signature(
    function: Callable[..., Any], path: str, text_names: Collection[str], kwargs: Collection[str]
) -> None:
    """Raise a `ValueError` unless the function can be called with these names and names a response parameter."""
    names = {*text_names, *kwargs}
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(f"function: {path!r} cannot be called with {', '.join(sorted(names))}: {error}") from error
    except ValueError:  # some built-in functions have no signature
        signature = inspect.Signature()

    # A function that only takes `**kwargs` fits any names, so this is no sign that it is meant as a reward.
    response_name = next(name for name in text_names if name.startswith("response"))
    if response_name not in signature.parameters:
        raise ValueError(f"function: {path!r} has no parameter {response_name!r}, so it cannot score responses")


def _unwrapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside nested partials; for a callable object, its `__call__`."""
    while isinstance(call, partial):
        call = call.func
    return call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004


def _failed_on(error: Exception, index: int, text: str) -> Exception:
    return ValueError(f"on text {index}, {beginning(text)}: {type(error).__name__}: {error}")
