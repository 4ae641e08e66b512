"""Formats of published data sets, whose rows become prompts and responses.

    sharegpt       {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}
    alpaca         {"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"}
    hh             {"chosen": "Human: Why?  Assistant: So.", "rejected": "Human: Why?  Assistant: Hm."}
    ultrafeedback  {"instruction": "Why?", "completions": [{"response": "So.", "overall_score": 8.0}, ...]}

and the forms of TRL's data sets:

    prompt_completion   {"prompt": "Why?", "completion": "So."}, texts or messages; with a `label` it is a preference
    messages            {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
    text                {"text": "All of it is learned."}

The turns of hh begin with two line breaks. A row gets the columns `prompt` and `response` and, of a preference,
`chosen` and `rejected`; the others stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

from rl4lms_like.core.sample import Learned
from rl4lms_like.data_pools.tables import LocatedRow, cell, dict_rows, prompt_cell, text_cell
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.wording import agreement, shown

FormatName: TypeAlias = Literal[
    "columns", "sharegpt", "alpaca", "hh", "ultrafeedback", "prompt_completion", "messages", "text"
]
Row: TypeAlias = "Mapping[str, Any]"

PROMPT = "prompt"
RESPONSE = "response"
CHOSEN = "chosen"
REJECTED = "rejected"
COMPLETION = "completion"
LABEL = "label"
MESSAGES = "messages"
TEXT = "text"

INPUT_TEMPLATE = "{instruction}\n\n{input}"

SIGNS: Mapping[str, str] = {
    "sharegpt": "`conversations` with `from` and `value`",
    "alpaca": "`instruction` with `output`, or with `chosen` and `rejected`",
    "hh": f"`{CHOSEN}` and `{REJECTED}` begin with two line breaks and 'Human:' and have an 'Assistant:'",
    "ultrafeedback": "`instruction` with `completions`",
    "prompt_completion": f"`{PROMPT}` with `{COMPLETION}`",
    "messages": f"`{MESSAGES}` with `role` and `content`",
    "text": f"`{TEXT}` is the only column",
}
"""Format -> how it is recognised."""

LEARNED: Mapping[str, Learned] = {
    "sharegpt": "conversation",
    "alpaca": "conversation",
    "messages": "conversation",
    "text": "text",
}
"""Format -> what a supervised run learns of its rows, if it is not the response alone."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""`from` of ShareGPT -> role of a message."""

_NAME = re.compile(r"\{(instruction|input)\}")
_HUMAN = "\n\nHuman:"
_ASSISTANT = "\n\nAssistant:"


@dataclass(frozen=True)
class RowFormat:
    """Format of the rows of a table.

    Args:
        format: format of a published data set, instead of names of columns: `sharegpt`, `alpaca`, `hh` (Anthropic),
            `ultrafeedback`, or TRL's `prompt_completion`, `messages`, `text`; `columns`: none of these. Default:
            recognised by the first row if no names are given.
        input_template: with the format `alpaca`: the prompt of a row with an input; without one, it is the instruction.
    """

    format: FormatName | None = None
    input_template: str = INPUT_TEMPLATE

    def read(
        self,
        rows: Iterable[tuple[int, LocatedRow]],
        *,
        names_columns: bool,
        needs_names: bool = False,
        needs_pairs: bool = False,
    ) -> FormattedRows:
        """Return numbered rows with the columns of this module.

        Args:
            rows: the rows of a table.
            names_columns: the config names columns, so that no format is recognised.
            needs_names: without a format, columns must be named.
            needs_pairs: leave out rows without a preference.

        Raises:
            DataPoolError: the settings contradict each other; while iterating: a row is not of the format.
        """
        if names_columns and self.format not in (None, "columns"):
            raise DataPoolError(f"set names of columns, or `format: {self.format}`, which has its own; not both")

        if not {"instruction", "input"} <= set(_NAME.findall(self.input_template)):
            raise DataPoolError(f"input_template: expected {{instruction}} and {{input}}, got {self.input_template!r}")

        # The first row is read now, since the format must be known before the others.
        rows = iter(rows)
        first = next(rows, None)
        is_recognised = self.format is None and not names_columns
        name: str = self.format or "columns"
        if first is not None:
            rows = chain([first], rows)
            if is_recognised:
                name = recognised(first[1][1])

                # A completion without a label is no preference: the columns of a pair are missing.
                if needs_pairs and name == "prompt_completion" and LABEL not in first[1][1]:
                    name = "columns"
            if needs_pairs and name in ("messages", "text"):
                _, (where, _) = first
                message = f"rows of the format {name} have no preferences; they are for supervised runs"
                raise DataPoolError(f"{where}: {message}")
            if self.input_template != INPUT_TEMPLATE and name != "alpaca":
                raise DataPoolError(f"input_template has no effect on the format {name!r}; it is for alpaca")
            if name == "columns" and needs_names and not names_columns:
                _, (where, row) = first
                known = ", ".join(CONVERTERS)
                text = f"set prompt_column to one of {', '.join(row)}; no format ({known}) was recognised"
                raise DataPoolError(f"{where}: {text}")
        return FormattedRows(name, is_recognised, rows, self.input_template, needs_pairs)


@dataclass
class FormattedRows:
    """Numbered rows of a format, and how many of them have no preference."""

    name: str
    is_recognised: bool
    rows: Iterator[tuple[int, LocatedRow]]
    input_template: str
    needs_pairs: bool
    n_without_pair: int = 0

    def __iter__(self) -> Iterator[tuple[int, LocatedRow]]:
        if self.name == "columns":
            yield from self.rows
            return
        convert = CONVERTERS[self.name]
        for index, (where, row) in self.rows:
            converted = {**row, **convert(row, where, self.input_template)}

            if self.needs_pairs and self._lacks_preference(converted):
                self.n_without_pair += 1
                continue
            yield index, (where, converted)

    def _lacks_preference(self, row: Row) -> bool:
        """Return True for a converted row without two responses to compare, or without a label."""
        # Answers with scores have none if there is a single one, or all have the same score; a row of alpaca, if its
        # column is null. An empty cell of a CSV file is an empty text.
        if self.name == "prompt_completion":
            return LABEL in row and row[LABEL] in (None, "")
        return REJECTED in row and row[REJECTED] is None

    @property
    def learned(self) -> Learned:
        """Part of the rows that a supervised run learns."""
        return LEARNED.get(self.name, "response")

    @property
    def description(self) -> str | None:
        """Name of the format and how it was chosen; None for columns. Rows left out are known after the last one."""
        if self.name == "columns":
            return None
        how = f"recognised by {SIGNS[self.name]}; `format: columns` reads columns" if self.is_recognised else "set"
        left_out = f"; {self.n_without_pair:,} rows without a preference left out" if self.n_without_pair else ""
        return f"{self.name} ({how}){left_out}"


def recognised(row: Row) -> str:
    """Return the format of a row, `columns` if it is none of the published ones."""
    # A table with this column has the prompt in it, whatever its others are.
    if PROMPT in row:
        return "prompt_completion" if COMPLETION in row else "columns"
    if set(row) == {TEXT}:
        return "text"
    if _is_list_of(row.get(MESSAGES), {"role", "content"}) and CHOSEN not in row:
        return "messages"

    has_turns = _is_list_of(row.get("conversations"), {"from", "value"})
    if has_turns and (CHOSEN not in row or isinstance(row[CHOSEN], Mapping)):
        return "sharegpt"
    if {"instruction", "completions"} <= set(row):
        return "ultrafeedback"
    if {"instruction", "output"} <= set(row) or {"instruction", CHOSEN, REJECTED} <= set(row):
        return "alpaca"

    dialogues = (row.get(CHOSEN), row.get(REJECTED))
    if all(isinstance(text, str) and text.startswith(_HUMAN) and _ASSISTANT in text for text in dialogues):
        return "hh"
    return "columns"


def _is_list_of(value: Any, keys: set[str]) -> bool:
    """Return whether a cell has objects with these keys, as a list or column by column."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, Mapping) and keys <= set(first)


# --- converters: the new columns of a row -----------------------------------------------------------------------------


def _of_sharegpt(row: Row, where: str, _: str) -> dict[str, Any]:
    turns = dict_rows(cell(row, "conversations", where), ["from", "value"], where)
    if not isinstance(turns, list):
        raise DataPoolError(f"{where}, column 'conversations': expected a list of turns, got {shown(turns)}")
    messages = [_message_of_turn(turn, f"{where}, column 'conversations'") for turn in turns]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": text_cell(row, "system", where)})

    # Of a preference, the conversation is the prompt; otherwise, its last message is the response.
    if CHOSEN in row:
        converted: dict[str, Any] = {PROMPT: messages, RESPONSE: None}
        for name in (CHOSEN, REJECTED):
            converted[name] = [_message_of_turn(cell(row, name, where), f"{where}, column {name!r}")]
        converted[RESPONSE] = converted[CHOSEN][0]
        return converted
    response = None
    if messages and messages[-1]["role"] == "assistant":
        response = messages.pop()
    if not messages:
        raise DataPoolError(f"{where}, column 'conversations': there is no turn before a response")
    return {PROMPT: messages, RESPONSE: response}


def _message_of_turn(turn: Any, where: str) -> dict[str, Any]:
    sender = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(sender, str) or sender not in _ROLES:
        roles = ", ".join(_ROLES)
        raise DataPoolError(f"{where}: expected turns with `value` and `from` ({roles}), got {shown(turn)}")
    text = text_cell(turn, "value", where)
    if sender != "function_call":
        return {"role": _ROLES[sender], "content": text}

    # One call, or a list of them, as JSON: {"name": ..., "arguments": {...}}.
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataPoolError(f"{where}: a function_call is not JSON: {error}") from error
    if not isinstance(calls, list):
        calls = [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataPoolError(f"{where}: expected a function_call with `name` and `arguments`, got {shown(text)}")
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def _of_alpaca(row: Row, where: str, input_template: str) -> dict[str, Any]:
    prompt: Any = text_cell(row, "instruction", where)
    input_text = text_cell(row, "input", where) if row.get("input") else ""
    if input_text.strip():
        # Each name is replaced once: the texts may have braces of their own, which `str.format` would read.
        values = {"instruction": prompt, "input": input_text}
        prompt = _NAME.sub(lambda match: values[match[1]], input_template)

    # Some tables have earlier turns, as pairs of instruction and answer, or a system message.
    messages = []
    if row.get("system"):
        messages.append({"role": "system", "content": text_cell(row, "system", where)})
    for turn in row.get("history") or ():
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise DataPoolError(f"{where}, column 'history': expected pairs of texts, got {shown(turn)}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    if messages:
        prompt = [*messages, {"role": "user", "content": prompt}]
    response = CHOSEN if "output" not in row and CHOSEN in row else "output"
    return {PROMPT: prompt, RESPONSE: text_cell(row, response, where)}


def _of_hh(row: Row, where: str, _: str) -> dict[str, Any]:
    chosen, rejected = (text_cell(row, name, where) for name in (CHOSEN, REJECTED))
    prompt = common_turns(chosen, rejected)
    if not prompt:
        raise DataPoolError(f"{where}: both texts have no {_ASSISTANT!r} in their common beginning")
    responses = {CHOSEN: chosen[len(prompt) :], REJECTED: rejected[len(prompt) :]}
    return {PROMPT: prompt, RESPONSE: responses[CHOSEN], **responses}


def common_turns(chosen: str, rejected: str) -> str:
    """Return the common beginning of two dialogues, up to the last turn of the assistant that begins in it."""
    start = chosen[: agreement(chosen, rejected)].rfind(_ASSISTANT)
    return "" if start < 0 else chosen[: start + len(_ASSISTANT)]


def _of_ultrafeedback(row: Row, where: str, _: str) -> dict[str, Any]:
    completions = cell(row, "completions", where)
    if isinstance(completions, Mapping):
        completions = dict_rows(completions, list(completions), where)
    if not isinstance(completions, list) or not all(isinstance(entry, Mapping) for entry in completions):
        raise DataPoolError(f"{where}, column 'completions': expected a list of objects, got {shown(completions)}")

    # The mean of the ratings, if there is one: `overall_score` has known errors (10 instead of 1).
    scored = []
    for completion in completions:
        score = _score(completion)
        if score is not None:
            scored.append((score, text_cell(completion, "response", f"{where}, column 'completions'")))
    converted: dict[str, Any] = {PROMPT: text_cell(row, "instruction", where)}
    if not scored:
        return converted | {RESPONSE: None, CHOSEN: None, REJECTED: None}

    best_score, best = max(scored, key=lambda pair: pair[0])
    worst_score, worst = min(scored, key=lambda pair: pair[0])
    if best_score == worst_score:
        return converted | {RESPONSE: best, CHOSEN: None, REJECTED: None}
    return converted | {RESPONSE: best, CHOSEN: best, REJECTED: worst, "margin": best_score - worst_score}


def _of_prompt_completion(row: Row, where: str, _: str) -> dict[str, Any]:
    prompt = prompt_cell(row, PROMPT, where)
    completion = prompt_cell(row, COMPLETION, where)
    if isinstance(completion, str):
        return {PROMPT: prompt, RESPONSE: completion}

    # Of several messages, some may be the user's: which of them are learned would not be clear.
    if len(completion) > 1 or completion[0]["role"] != "assistant":
        raise DataPoolError(
            f"{where}, column {COMPLETION!r}: expected one message of the assistant, got {len(completion)} messages; "
            f"put those before the last one into {PROMPT!r}, or all into one column {MESSAGES!r}, of which all "
            f"messages of the assistant are learned"
        )
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {PROMPT: prompt, RESPONSE: completion[0]}


def _of_messages(row: Row, where: str, _: str) -> dict[str, Any]:
    messages = prompt_cell(row, MESSAGES, where)
    if isinstance(messages, str):
        raise DataPoolError(f"{where}, column {MESSAGES!r}: expected messages (role, content), got {shown(messages)}")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        return {PROMPT: messages, RESPONSE: None}
    return {PROMPT: messages[:-1], RESPONSE: messages[-1]}


def _of_text(row: Row, where: str, _: str) -> dict[str, Any]:
    return {PROMPT: "", RESPONSE: text_cell(row, TEXT, where)}


def _score(completion: Row) -> float | None:
    for name in ("fine-grained_score", "overall_score"):
        try:
            score = float(completion[name])
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if abs(score) < float("inf"):  # False for NaN
            return score
    return None


CONVERTERS: Mapping[str, Callable[[Row, str, str], dict[str, Any]]] = {
    "sharegpt": _of_sharegpt,
    "alpaca": _of_alpaca,
    "hh": _of_hh,
    "ultrafeedback": _of_ultrafeedback,
    "prompt_completion": _of_prompt_completion,
    "messages": _of_messages,
    "text": _of_text,
}
"""Format -> function of a row, its location and the template of inputs, which returns the new columns."""
