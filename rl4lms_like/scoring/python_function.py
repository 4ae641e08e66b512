"""Values that a Python function computes for responses: the base of a reward and of a metric.

A function gets what the names of its parameters say, as keyword arguments:

    responses, prompts, references, meta_infos     lists with one entry per response; returns one value per response
    response, prompt, references, meta_info        one call per response, which returns a value
    completions, prompts, completion_ids           the form of TRL's trainers: texts, or for conversations messages
    steps, and the names of one response           one call per response, which returns a value for each step
    images, in addition to any of these            the images of the prompt (PIL, RGB): a list for each response
    any other name                                 the column of the data with this name (a key of `meta_info`)

`**kwargs` gets the others: in TRL's form all columns, otherwise all names of the form. The function may be `async`.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from pydantic import PlainValidator

from rl4lms_like.core.generated import Generated
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.event_loop import EventLoop, gathered
from rl4lms_like.system.functions import GIVE_AGAIN, NamedFunction, function_of, imported_again, short_name, split_name
from rl4lms_like.system.import_paths import importable
from rl4lms_like.system.numbers import Count, Positive
from rl4lms_like.system.wording import InWords, beginning

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

BATCHED_NAMES = ("prompts", "responses", "references", "meta_infos")
SINGLE_NAMES = ("prompt", "response", "references", "meta_info")
TRL_NAMES = ("prompts", "completions", "completion_ids")
STEP_NAMES = (*SINGLE_NAMES, "steps")
"""Parameters that get the texts in each form."""

IMAGES = "images"
"""Parameter that gets the images of the prompts, unless the data have a column of this name."""

SIGNS = {"responses": BATCHED_NAMES, "response": SINGLE_NAMES, "completions": TRL_NAMES, "completion_ids": TRL_NAMES}
"""Parameter for the responses -> the form that it is the sign of."""


def function_name(value: Any) -> Any:
    """Validate a function of a config, or of Python; return its name, in Python with the function.

    Raises:
        ValueError: it is neither a function nor an import path, or cannot be imported.
    """
    if isinstance(value, NamedFunction):
        return value
    if isinstance(value, str):
        # A function that was given in Python is imported when it is needed: a run folder can be read without it.
        _, digest = split_name(value)
        return value if digest else importable(value)
    if callable(value):
        return NamedFunction(value)
    raise ValueError(f"expected a function, or an import path 'package.module:name', got {value!r:.60}")


FunctionName: TypeAlias = Annotated[Any, PlainValidator(function_name), InWords("a function, or its import path")]
"""Function of a component: in Python the function itself, in a file its import path."""


def scores_text(function: Any) -> bool:
    """Return whether a function has a parameter for responses, so that it scores texts instead of tokens."""
    try:
        return not SIGNS.keys().isdisjoint(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False


@dataclass(frozen=True)
class Parameters:
    """Parameters of a function, which decide what it is called with.

    Args:
        names: those that can be passed by name.
        required: those of them without a default.
        takes_others: whether it has `**kwargs`.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_others: bool

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Parameters:
        """Return the parameters of a function; `name` is for messages.

        Raises:
            ValueError: they cannot be read, or not be passed by name.
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise ValueError(f"function: the parameters of {name!r} cannot be read: {error}") from error

        unnamed = [item.name for item in parameters if item.kind is item.POSITIONAL_ONLY and item.default is item.empty]
        if unnamed:
            raise ValueError(f"function: {name!r} takes {', '.join(unnamed)} only by position; all are passed by name")
        named = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
        return cls(
            names=tuple(item.name for item in named),
            required=tuple(item.name for item in named if item.default is item.empty),
            takes_others=any(item.kind is item.VAR_KEYWORD for item in parameters),
        )


@dataclass(eq=False, repr=False)  # `kwargs` may contain secrets
class FunctionScore:
    """Values of a Python function; its fields are the arguments of a reward and of a metric.

    Args:
        function: a function, or `package.module:name` in an installed package or in a folder given by `--code`, or
            `FILE.py:name`.
        batched: one call for all texts; false: one call per text. Default: false if the function has a parameter
            `response`.
        kwargs: additional keyword arguments.
        max_concurrency: maximum number of concurrent calls of an async function that is not batched.
        timeout_s: time limit of one call in seconds; default: none. A synchronous function keeps running in its thread
            after the timeout; its result is discarded.
    """

    function: FunctionName
    batched: bool | None = None
    kwargs: dict[str, Any] | None = None
    max_concurrency: Count = 16
    timeout_s: Positive | None = None

    def __post_init__(self) -> None:
        try:
            self.function = function_name(self.function)
            function = function_of(self.function)
        except ValueError as error:
            raise ValueError(f"function: {error}") from error
        self._path, _ = split_name(self.function)
        self._kwargs = dict(self.kwargs or {})
        self._loop = EventLoop(self.__name__)
        self.is_async = inspect.iscoroutinefunction(_unwrapped(function))

        self._parameters = Parameters.of(function, self._path)
        if self.batched is None:
            self.batched = "response" not in self._parameters.names
        self._form = self._form_of(self._parameters)
        self._check_kwargs()

    def __getstate__(self) -> dict[str, Any]:
        # An imported function is imported again in another process.
        return {name: value for name, value in self.__dict__.items() if name != "_called"}

    @property
    def __name__(self) -> str:
        """Name in error messages."""
        return f"the function {self._path!r}"

    @property
    def label(self) -> str:
        """Name of the function without its module, for logs."""
        return short_name(self.function)

    @cached_property
    def _called(self) -> Callable[..., Any]:
        is_given = isinstance(self.function, NamedFunction)
        function: Callable[..., Any] = self.function.value if is_given else imported_again(self._path)
        return function

    def _form_of(self, parameters: Parameters) -> tuple[str, ...]:
        """Return the names of the form that the function has; a `ValueError` if it has no parameter for responses.

        A function that only takes `**kwargs` fits any names, so this is no sign that it scores responses.
        """
        signs = ("responses", "completions", "completion_ids") if self.batched else ("response",)
        for sign in signs:
            if sign in parameters.names:
                return SIGNS[sign]
        others = ", ".join(parameters.names) or "none"
        expected = " or ".join(map(repr, signs[:2]))
        raise ValueError(
            f"function: {self._path!r} has no parameter {expected}, so it cannot score responses; it has: {others}"
        )

    def _check_kwargs(self) -> None:
        for name in self._kwargs:
            if name in self._form:
                raise ValueError(f"kwargs: {name!r} is passed to {self._path!r} by the library")
            if name not in self._parameters.names and not self._parameters.takes_others:
                names = ", ".join(self._parameters.names)
                raise ValueError(f"kwargs: {self._path!r} has no parameter {name!r}; it has: {names}")

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Parameters without a default that must be columns of the data."""
        known = {*self._form, *self._kwargs, IMAGES}
        if self._form == TRL_NAMES:  # our names are passed to such a function, too, if it has them
            known |= set(BATCHED_NAMES)
        return tuple(name for name in self._parameters.required if name not in known)

    # --- arguments of a call ----------------------------------------------------------------------------------------

    def _columns(self, generated: Sequence[Generated], known: Collection[str]) -> list[str]:
        """Return the columns of some samples that are passed to the function."""
        takes_all = self._form == TRL_NAMES and self._parameters.takes_others
        columns: dict[str, None] = {}
        for item in generated:
            for name in item.sample.meta_data or {}:
                is_free = name not in known and name not in self._kwargs
                if is_free and (takes_all or name in self._parameters.names):
                    columns[name] = None
        return list(columns)

    def _for_batch(self, generated: Sequence[Generated]) -> dict[str, Any]:
        """Return the keyword arguments of one call for all responses."""
        values: dict[str, list[Any]] = {
            "prompts": [item.sample.prompt_or_input_text for item in generated],
            "responses": [item.text for item in generated],
            "references": [item.sample.references for item in generated],
            "meta_infos": [item.sample.meta_data for item in generated],
        }
        if self._form == TRL_NAMES:
            values["prompts"] = [_trl_prompt(item.sample) for item in generated]
            values["completions"] = [_trl_completion(item) for item in generated]
            if all(item.response_ids is not None for item in generated):
                values["completion_ids"] = [item.response_ids.tolist() for item in generated]  # type: ignore[union-attr]

        # With `**kwargs` all names of its form, otherwise those that it has.
        names = set(self._parameters.names)
        if self._parameters.takes_others:
            names |= set(self._form)
        arguments = {name: value for name, value in values.items() if name in names}
        if self._takes_images(generated):
            arguments[IMAGES] = _opened(generated)
        for column in self._columns(generated, known=arguments):
            arguments[column] = [(item.sample.meta_data or {}).get(column) for item in generated]
        return arguments

    def _for_one(self, item: Generated) -> dict[str, Any]:
        """Return the keyword arguments of the call for one response."""
        sample = item.sample
        row = (sample.prompt_or_input_text, item.text, sample.references, sample.meta_data)
        values: dict[str, Any] = dict(zip(SINGLE_NAMES, row, strict=True))
        if self._form == STEP_NAMES:
            assert item.steps is not None
            values["steps"] = list(item.steps)
        arguments = values
        if not self._parameters.takes_others:
            arguments = {name: value for name, value in values.items() if name in self._parameters.names}
        if self._takes_images([item]):
            arguments[IMAGES] = _opened([item])[0]
        columns = self._columns([item], known=arguments)
        return arguments | {column: (sample.meta_data or {})[column] for column in columns} | self._missing(sample)

    def _takes_images(self, generated: Sequence[Generated]) -> bool:
        """Return whether the function gets the images of these prompts; `**kwargs` gets them only if there are any."""
        if IMAGES in self._kwargs or any(IMAGES in (item.sample.meta_data or {}) for item in generated):
            return False
        has_images = any(item.sample.images for item in generated)
        return IMAGES in self._parameters.names or (self._parameters.takes_others and has_images)

    def _missing(self, sample: Sample) -> dict[str, None]:
        """Return None for each column that a sample lacks and that the function needs."""
        meta_data = sample.meta_data or {}
        return {column: None for column in self.needed_columns if column not in meta_data}

    # --- calls ------------------------------------------------------------------------------------------------------

    def values(self, generated: Sequence[Generated]) -> Any:
        """Return what the function returns: something with one value for each response."""
        if self.batched:
            arguments = self._for_batch(generated)
            # Columns that no sample of this batch has, but others of the data do.
            for column in self.needed_columns:
                arguments.setdefault(column, [None] * len(generated))
            return self._call(partial(self._called, **arguments, **self._kwargs))

        calls = [partial(self._called, **self._for_one(item), **self._kwargs) for item in generated]

        # An async function waits for many answers at once; the values come in the order of the texts all the same.
        if self.is_async:
            waiting = []
            for index, call in enumerate(calls):
                waiting.append(partial(self._awaited_for_text, call, index, generated[index].text))
            return self._loop.run(gathered(waiting, self.max_concurrency))

        values = []
        for index, call in enumerate(calls):
            try:
                values.append(self._call(call))
            except Exception as error:
                raise _failed_on(error, index, generated[index].text) from error
        return values

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
        if self.timeout_s is None or self.is_async:
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


class StepFunctionScore(FunctionScore):
    """Values of a Python function for the steps of a response: a list for each response, of which it gets `steps`."""

    def _form_of(self, parameters: Parameters) -> tuple[str, ...]:
        if "steps" not in parameters.names:
            others = ", ".join(parameters.names) or "none"
            raise ValueError(
                f"function: {self._path!r} has no parameter 'steps', so it cannot score steps; it has: {others}"
            )
        return STEP_NAMES


def built_object(name: Any, argument: str) -> Any:
    """Return the object that a name carries; a `ValueError` if it carries none, since it cannot be built again."""
    if isinstance(name, NamedFunction):
        return name.value
    class_name = short_name(str(name))
    again = GIVE_AGAIN.format(argument=argument, name=f"{class_name}(...)")
    raise ValueError(f"object: a {class_name} was built in Python; {again}")


def columns_of(samples: Iterable[Sample]) -> list[str]:
    """Return the columns that functions can get by name: the keys of the samples' `meta_data`."""
    columns: dict[str, None] = {}
    for sample in samples:
        columns |= dict.fromkeys(sample.meta_data or ())
    return list(columns)


def column_issue(component: Any, columns: Collection[str]) -> str | None:
    """Return the message for a parameter of a component's function that is neither known nor a column of the data.

    `columns` are those of the samples that the component scores. Components without a function have no such parameter.
    """
    for name in getattr(component, "needed_columns", ()):
        if name in columns:
            continue
        nearest = difflib.get_close_matches(name, [*SIGNS, *BATCHED_NAMES, *SINGLE_NAMES, IMAGES, *columns], n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        known = ", ".join(columns) or "none"
        return (
            f"{component.__name__} has the parameter {name!r}, which is neither a known name nor a column of the data; "
            f"{hint}columns: {known} (of a file: `meta_columns`)"
        )
    return None


def _opened(generated: Sequence[Generated]) -> list[list[Image]]:
    """Return the images of each prompt, each file read once."""
    # A copy for each response: functions may change an image, such as by `thumbnail`.
    opened: dict[Picture, Image] = {}
    images_of_all = []
    for item in generated:
        images = []
        for picture in item.sample.images:
            if picture not in opened:
                opened[picture] = picture.open()
            images.append(opened[picture].copy())
        images_of_all.append(images)
    return images_of_all


def _trl_prompt(sample: Sample) -> Any:
    """Return a prompt as TRL passes it: a text, or the messages of a conversation."""
    if sample.messages is None:
        return sample.prompt_or_input_text
    return [dict(message) for message in sample.messages]


def _trl_completion(item: Generated) -> Any:
    """Return a response as TRL passes it: a text, or the message that ends a conversation."""
    if item.sample.messages is None:
        return item.text
    return [{"role": "assistant", "content": item.text}]


def _unwrapped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside nested partials; for a callable object, its `__call__`."""
    while isinstance(call, partial):
        call = call.func
    return call if inspect.isroutine(call) else getattr(call, "__call__", call)  # noqa: B004


def _failed_on(error: Exception, index: int, text: str) -> Exception:
    return ValueError(f"on text {index}, {beginning(text)}: {type(error).__name__}: {error}")
