"""Environments whose public methods are tools, which the model calls in its text.

    policy        <tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>     one or several in a turn
    environment   [{"role": "tool", "name": "add", "content": "7"}]
    policy        It is 7.                                              no call: the final answer, scored by `reward`

The schema of a tool comes from its signature and docstring (transformers' `get_json_schema`), and a call's arguments
are checked against the signature. A wrong call is answered with the reason. An exception in a tool is an answer too if
it is one of `tool_errors`; every other one is a bug of the tool, and is raised.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from rl4lms_like.core.sample import Sample
from rl4lms_like.core.turns import Answer
from rl4lms_like.system.errors import ComponentError, ConfigError, ConfigIssue
from rl4lms_like.system.event_loop import EventLoop, gathered
from rl4lms_like.system.import_paths import imported
from rl4lms_like.system.schema import check_arguments
from rl4lms_like.system.wording import excerpt, raised

_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
"""A call; the last one of a text may have no closing tag, when the turn was stopped at it or cut before it."""

_ARGUMENTS = ("arguments", "parameters")
"""Keys of the arguments of a call; the second one is that of Llama 3."""

_THOUGHT = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)

_ERROR = "error: "
"""Begins the content of an answer to a wrong call."""

_EXCERPT = 200
"""Characters of a wrong call that its answer repeats."""

_LONGEST_TEXT = 1_000_000


class WrongCallError(ValueError):
    """A call that cannot be made; the message is the answer to it."""


@dataclass(frozen=True)
class ToolCall:
    """A call in a text of the model.

    Args:
        name: name of the tool, which need not exist.
        arguments: its arguments, not yet checked.
    """

    name: str
    arguments: Mapping[str, Any]


class ToolEnv(gymnasium.Env[Any, str]):
    """Environment whose public methods are tools. A subclass defines these methods, and usually `start` and `reward`.

    All public methods are tools except those that this class and `gymnasium.Env` have, and `player`. A tool has types
    and a docstring with a description of each argument. It may be `async`; the async calls of a turn run at the same
    time. A result that is not a text is answered as JSON.

    Calls are written as Hermes and Qwen models do, or the whole turn is a JSON object with `name` and `arguments` (or
    `parameters`), or a list of these. What is written between `<think>` and `</think>` is neither a call nor an answer.

    Metrics: `calls`, `failed_calls`, and `calls/<tool>` for each tool.

    Examples:
        >>> class Shelf(ToolEnv):
        ...     def find(self, title: str) -> str:
        ...         '''Find the place of a book.
        ...
        ...         Args:
        ...             title: its title.
        ...         '''
        ...         return "row 3"
        >>> shelf = Shelf()
        >>> first, info = shelf.reset(options={"sample": Sample("0", "Where is Emma?")})
        >>> shelf.step('<tool_call>{"name": "find", "arguments": {"title": "Emma"}}</tool_call>')[0]
        [{'role': 'tool', 'name': 'find', 'content': 'row 3'}]
    """

    tool_errors: ClassVar[tuple[type[Exception], ...]] = (ValueError,)
    """Exceptions of tools that are answers to the model; all others end the run."""

    observation_space = spaces.Text(_LONGEST_TEXT, min_length=0)
    action_space = spaces.Text(_LONGEST_TEXT, min_length=0)

    def start(self, sample: Sample) -> Answer:
        """Start an episode and return its prompt; by default the prompt of the sample."""
        return sample.messages or sample.prompt_or_input_text

    def reward(self, answer: str) -> float:
        """Return the reward of a turn without a call, which ends the episode; by default 0."""
        del answer
        return 0.0

    @functools.cached_property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """Tools by name."""
        return {name: getattr(self, name) for name in _tool_names(type(self))}

    @functools.cached_property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, as chat templates render them.

        Raises:
            ComponentError: a tool has no docstring, no types, or an argument without description.
        """
        # Not at the top: importing transformers takes seconds, and listing environments must not.
        from transformers.utils.chat_template_utils import get_json_schema

        schemas = []
        for name, tool in self.tools.items():
            try:
                schema = get_json_schema(tool)
            except Exception as error:
                where = f"the tool {name!r} of {type(self).__name__}"
                raise ComponentError(f"{where} has no schema: {raised(error)}") from error
            schema["function"]["name"] = name
            schemas.append(schema)
        return schemas

    @functools.cached_property
    def event_loop(self) -> EventLoop:
        """Event loop of the async methods, one for all: a client of a server stays with the loop of its first call."""
        return EventLoop("tools")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seed of `self.np_random`.
            options: `sample`, with the prompt.

        Returns:
            What `start` returns, and `tools` with the schemas of the tools.

        Raises:
            ComponentError: a tool has no schema.
        """
        super().reset(seed=seed)
        self.sample = (options or {}).get("sample") or Sample("", "")
        self._n_calls: Counter[str] = Counter()
        return self.start(self.sample), {"tools": self.tool_schemas}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make the calls of a turn, or end the episode with the reward of an answer.

        Returns:
            Messages with the role `tool`, one for each call; empty at the end.
        """
        text = _THOUGHT.sub("", action).rpartition("</think>")[2]  # the template may have written the first <think>
        calls = tool_calls(text)

        # A turn without a call is the final answer.
        if not calls:
            reward = float(self.reward(text.strip()))
            return "", reward, True, False, {"metrics": self._metrics()}

        answers = []
        for call, result in zip(calls, self._results(calls), strict=True):
            # The name of a tool that does not exist is not repeated: it may be any text, such as a special token, and
            # templates write names as they are.
            is_known = isinstance(call, ToolCall) and call.name in self.tools
            name = call.name if isinstance(call, ToolCall) and is_known else "unknown"
            answers.append({"role": "tool", "name": name, "content": _content(result)})

            # By the type of the result, not by the text of the answer: a tool may return a text that begins like an
            # error.
            self._n_calls["calls"] += 1
            self._n_calls["failed_calls"] += isinstance(result, Exception)
            if is_known:
                self._n_calls[f"calls/{name}"] += 1
        return answers, 0.0, False, False, {"metrics": self._metrics()}

    def _metrics(self) -> dict[str, float]:
        """Return the numbers of calls in the episode so far, also of tools that were not called."""
        names = ["calls", "failed_calls", *(f"calls/{name}" for name in self.tools)]
        return {name: float(self._n_calls[name]) for name in names}

    def _results(self, calls: Sequence[ToolCall | WrongCallError]) -> list[Any]:
        """Return what the tools of the calls return, or the errors that are the answers, in their order."""
        results: list[Any] = []
        for call in calls:
            results.append(self._result(call))

        # Synchronous tools have run in order; the async ones, which wait for something, now wait at the same time.
        waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            results_of = [functools.partial(_result_of, results[index], self.tool_errors) for index in waiting]
            awaited = self.event_loop.run(gathered(results_of, at_once=len(waiting)))
            for index, result in zip(waiting, awaited, strict=True):
                results[index] = result
        return results

    def _result(self, call: ToolCall | WrongCallError) -> Any:
        """Return what a tool returns (of an async one, what is to be awaited), or the error that is its answer."""
        if isinstance(call, WrongCallError):
            return call
        tool = self.tools.get(call.name)
        if tool is None:
            return WrongCallError(f"there is no tool {call.name[:_EXCERPT]!r}; there are: {', '.join(self.tools)}")

        # Checked before the call: a TypeError in the tool itself is a bug, one by the model's arguments an answer.
        arguments, issues = check_arguments(tool, call.arguments, "")
        if issues:
            return WrongCallError("; ".join(str(issue) for issue in issues))
        try:
            return tool(**arguments)
        except self.tool_errors as error:
            return error

    def close(self) -> None:
        """End the thread of the event loop, if async tools have started it."""
        vars(self).pop("event_loop", None)


class FunctionTools(ToolEnv):
    """Tools that are plain functions. The final answer has no reward of its own: `reward_fn` scores it.

    Args:
        tools: functions, or their import paths such as `my_module:search`.

    Raises:
        ConfigError: there is no tool, one cannot be imported or is no function, or two have the same name.
    """

    def __init__(self, tools: list[Any]) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        issues = []
        for index, tool in enumerate(tools):
            try:
                function = imported(tool) if isinstance(tool, str) else tool
            except Exception as error:  # importing a user's module runs the user's code
                issues.append(ConfigIssue(f"tools[{index}]", f"cannot import {tool!r}: {raised(error)}"))
                continue
            name = getattr(function, "__name__", "")
            if not callable(function) or not name:
                issues.append(ConfigIssue(f"tools[{index}]", f"expected a function, got {excerpt(function)}"))
            elif name in self._functions:
                issues.append(ConfigIssue(f"tools[{index}]", f"there is already a tool {name!r}; rename one of them"))
            else:
                self._functions[name] = function
        if not tools:
            issues.append(ConfigIssue("tools", "expected at least one function"))
        if issues:
            raise ConfigError(issues, "the tools")

    @functools.cached_property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """Tools by name."""
        return self._functions


def tool_calls(text: str) -> list[ToolCall | WrongCallError]:
    """Return the calls in a text; those that cannot be read as errors that say why. Empty for a text without calls.

    Examples:
        >>> tool_calls('{"name": "add", "parameters": {"a": 1}}')
        [ToolCall(name='add', arguments={'a': 1})]
        >>> tool_calls("The answer is 3.")
        []
    """
    calls: list[ToolCall | WrongCallError] = []
    for match in _HERMES_CALL.finditer(text):
        try:
            calls.append(_call_of(_json(match[1]), match[1]))
        except ValueError as error:
            calls.append(error if isinstance(error, WrongCallError) else _unreadable(match[1]))
    if calls:
        return calls

    # A whole turn of JSON. An answer may be JSON too, so that it must have both keys to be a call.
    try:
        value = _json(text)
    except ValueError:
        return []
    entries = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, dict) and "name" in entry and entry.keys() & set(_ARGUMENTS) for entry in entries):
        return []
    for entry in entries:
        try:
            calls.append(_call_of(entry, text))
        except WrongCallError as error:
            calls.append(error)
    return calls


def _json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, is nested too deeply to be read, or has a number that is NaN or infinite, or a text
            that is no valid Unicode text.
    """
    try:
        value = json.loads(text)

        # Python also reads NaN, 1e999 as infinity, and the half of a character, "\ud800", which no tokenizer can
        # encode.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        return value
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _call_of(value: Any, text: str) -> ToolCall:
    """Return the call that a JSON value describes.

    Raises:
        WrongCallError: it describes none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _unreadable(text)
    arguments: Any = {}
    for key in _ARGUMENTS:
        arguments = value.get(key, arguments)

    # Some models write the arguments as a JSON text.
    if isinstance(arguments, str):
        try:
            arguments = _json(arguments)
        except ValueError:
            raise _unreadable(text) from None
    if not isinstance(arguments, dict):
        raise _unreadable(text)
    return ToolCall(value["name"], arguments)


def _unreadable(text: str) -> WrongCallError:
    expected = '{"name": ..., "arguments": {...}}'
    return WrongCallError(f"expected {expected}, got {text.strip()[:_EXCERPT]!r}")


def _content(result: Any) -> str:
    """Return the result of a tool as a text."""
    if isinstance(result, Exception):
        return f"{_ERROR}{result}"
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


async def _result_of(awaitable: Awaitable[Any], errors: tuple[type[Exception], ...]) -> Any:
    """Return the result of an async tool, or the exception of one of these kinds."""
    try:
        return await awaitable
    except errors as error:
        return error


def _tool_names(cls: type) -> list[str]:
    """Return the names of the tools of a class, in the order of their definitions, those of its bases first."""
    reserved = {"player", *dir(ToolEnv)}
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        for name in vars(base):
            member = inspect.getattr_static(cls, name)
            is_method = inspect.isfunction(member) or isinstance(member, staticmethod | classmethod)
            if is_method and not name.startswith("_") and name not in reserved:
                names[name] = None
    return list(names)
