"""Checks of what the methods of an environment return, in runs and in `testing.check_text_environment`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rl4lms_like.core.turns import Answer
from rl4lms_like.rewards.call import finite_number
from rl4lms_like.system.wording import excerpt

METRICS = "metrics"
"""Key of an environment's `info` with numbers to average and log, by name."""
TOOLS = "tools"
"""Key of the `info` of `reset` with descriptions of functions, for the chat template."""


class ReturnedError(ValueError):
    """A method returned something else than its result; the message begins with `returned`."""


class Opened(NamedTuple):
    """Result of `reset`: first text, tools and metrics."""

    first: Answer
    tools: list[dict[str, Any]] | None
    metrics: dict[str, float]


class Answered(NamedTuple):
    """Result of `step`."""

    answer: Answer
    reward: float
    terminated: bool
    truncated: bool
    metrics: dict[str, float]


def opened(result: Any) -> Opened:
    """Return the parts of what `reset` returned.

    Raises:
        ReturnedError: it is something else.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ReturnedError(f"returned {excerpt(result)}; expected (text or messages, info)")
    first, info = result
    _require_text(first)
    metrics = _metrics(info)
    return Opened(first, _tools(info.get(TOOLS)), metrics)


def answered(result: Any) -> Answered:
    """Return the parts of what `step` returned, with the reward as a number.

    Raises:
        ReturnedError: it is something else.
    """
    if not (isinstance(result, tuple) and len(result) == 5):
        expected = "expected (text or messages, reward, terminated, truncated, info)"
        raise ReturnedError(f"returned {excerpt(result)}; {expected}")
    answer, reward, terminated, truncated, info = result

    number = finite_number(reward)
    if number is None:
        raise ReturnedError(f"returned the reward {excerpt(reward)}; expected one finite number")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise ReturnedError(f"returned {name}={excerpt(flag)}; expected True or False")
    _require_text(answer)
    return Answered(answer, number, bool(terminated), bool(truncated), _metrics(info))


def _require_text(text: Any) -> None:
    """Check that an environment returned a text, or messages that a chat template can render."""
    if isinstance(text, str):
        contents = [text]
    else:
        is_list = isinstance(text, list | tuple) and bool(text)
        if not is_list or not all(map(_is_message, text)):
            raise ReturnedError(f"returned {excerpt(text)}; expected a text, or messages with role and content")
        if text[-1]["role"] == "assistant":
            expected = "the last one must not be the assistant's, whose next message the policy writes"
            raise ReturnedError(f"returned messages, {excerpt(text)}; {expected}")
        contents = [message.get("content") or "" for message in text]

    # Such as a half of an emoji, of a file that was decoded with `surrogateescape`: no tokenizer can encode it.
    for content in contents:
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ReturnedError(f"returned {excerpt(text)}, which is no valid Unicode text: {error}") from error


def _is_message(message: Any) -> bool:
    """Return whether a value is a message; one that only calls tools may have no content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    calls = message.get("tool_calls")
    if calls is not None and not _are_functions(calls):
        return False
    content = message.get("content")
    return isinstance(content, str) or (content is None and bool(calls))


def _are_functions(values: Any) -> bool:
    """Return whether a value is a list of calls or of descriptions, each with the name of a function.

    The name is in the mapping itself or, as OpenAI writes it, in the one under `function`.
    """
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        return False
    functions = [value.get("function", value) for value in values]
    return all(isinstance(function, Mapping) and isinstance(function.get("name"), str) for function in functions)


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the descriptions of functions in the `info` of `reset`, None if there are none."""
    if tools is None:
        return None
    if not _are_functions(tools):
        expected = "expected a list of JSON schemas of functions with names, as those of transformers' get_json_schema"
        raise ReturnedError(f"returned the tools {excerpt(tools)}; {expected}")
    return list(tools)


def _metrics(info: Any) -> dict[str, float]:
    """Return the numbers in the `info` of an environment."""
    if not isinstance(info, Mapping):
        raise ReturnedError(f"returned the info {excerpt(info)}; expected a mapping")
    reported = info.get(METRICS) or {}
    if not isinstance(reported, Mapping):
        raise ReturnedError(f"returned info[{METRICS!r}] {excerpt(reported)}; expected a mapping")
    metrics = {}
    for name, value in reported.items():
        number = finite_number(value)
        if number is None or not isinstance(name, str):
            of = f"info[{METRICS!r}][{name!r}]"
            raise ReturnedError(f"returned {of} {excerpt(value)}; expected one finite number")
        metrics[name] = number
    return metrics
