"""Pool of preferences: pairs of a better and a worse response to a prompt, or single responses with a label.

    pair     {"prompt": "I saw it", "chosen": "and loved it.", "rejected": "and left."}
    pair     {"chosen": "I saw it and loved it.", "rejected": "I saw it and left."}       prompt: common beginning
    pair     {"chosen": [user, assistant], "rejected": [user, assistant]}                 prompt: common messages
    pair     {"prompt": [user], "chosen": [assistant, user, assistant], "rejected": ...}  several turns
    label    {"prompt": "I saw it", "response": "and left.", "label": false}

    {..., "chosen_truncated": true}     the response ended at a length limit: no end token is learned after it

Responses are texts, or lists of messages that end with one of the assistant. Without a prompt, it is what both have in
common at their beginning, up to a whole message that is not the assistant's. What follows is the response, of one or
several turns. The better response is the sample's reference, so that a supervised run can learn from it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.core.sample import Message, Preference, Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.files import DataFiles
from rl4lms_like.data_pools.formats import COMPLETION, LABEL, PROMPT, RowFormat
from rl4lms_like.data_pools.hf_dataset import dataset_rows
from rl4lms_like.data_pools.images import PictureColumns, response_without_places
from rl4lms_like.data_pools.tables import LocatedRow, cell, prompt_cell, table_rows, tools_cell
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import DataPoolError, require_extra
from rl4lms_like.system.wording import agreement, shown

Messages: TypeAlias = "list[Message]"
TRUNCATED = "_truncated"
"""After the name of a column of responses: the column that is true where a response ended at a length limit."""

_LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class PreferenceColumns:
    """Mapping of a table's columns to the fields of a preference.

    Args:
        prompt_column: column with the prompt, a text or messages; default: `prompt`, or if there is none, the common
            beginning of both responses.
        chosen_column: column with the better response: a text, or messages that end with the response.
        rejected_column: column with the worse response.
        label_column: column that is true for good and false for bad responses; each row then has one response.
        response_column: with `label_column`: column with the response.
        margin_column: column with the number by which the better response should exceed the worse one in the rewards
            of a reward model.
        tools_column: column with the tools that the model may call, for the chat template; default: with prompts that
            are messages, `tools`, if there is one.
        image_column: one or more columns with the images of the prompt: the path of a file, relative to the data file;
            bytes; a `data:` URL; or a list of these. `<image>` in the prompt marks their places; without it, they come
            first.
    """

    prompt_column: str | None = None
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    label_column: str | None = None
    response_column: str = "response"
    margin_column: str | None = None
    tools_column: str | None = None
    image_column: str | list[str] | None = None

    @property
    def has_names(self) -> bool:
        """True if columns of the prompt or of responses are named, so that the rows are not of a published format."""
        unnamed = PreferenceColumns(
            margin_column=self.margin_column, tools_column=self.tools_column, image_column=self.image_column
        )
        return self != unnamed

    def preferences(
        self, rows: Iterable[tuple[int, LocatedRow]], split: str, folder: Path | None = None
    ) -> Iterator[Preference]:
        """Yield the preference of each numbered row; missing or unfit values are a `DataPoolError`.

        Images that cannot be read are one error, after the last row. Their relative paths are those in `folder`.
        """
        pictures = PictureColumns(self.image_column, folder)
        for index, (where, row) in rows:
            preference = self._preference(f"{split}_{index}", row, where, pictures)
            if preference is not None:
                yield preference
        pictures.raise_errors()

    def _preference(self, id: str, row: Mapping[str, Any], where: str, pictures: PictureColumns) -> Preference | None:
        """Return the preference of a row; None if something is wrong with its images, which `pictures` reports."""
        prompt, responses, whole_messages = self._prompt_and_responses(row, where)
        column = self.prompt_column or PROMPT
        if self._is_implicit(row):  # the responses begin with it
            column = self.response_column if self.label_column else self.chosen_column
        illustrated = pictures.illustrated(prompt, responses, row, where, column=column)
        if illustrated is None:
            return None
        prompt, images = illustrated

        # A pair has the better response first. A labelled row has one: the reference, or the rejected response.
        is_good = self.label_column is None or _label(row, self.label_column, where)
        references = responses[:1] if is_good else []
        rejected = None if self.label_column and is_good else responses[-1]

        sample = Sample(id, prompt) if isinstance(prompt, str) else Sample.of_messages(id, prompt, images=images)
        return Preference(
            id,
            sample.prompt_or_input_text,
            references,
            truncated=self._truncated(responses, row, where),
            messages=sample.messages,
            tools=tools_cell(row, self.tools_column, where, is_chat=sample.messages is not None),
            response_messages=whole_messages,
            rejected=rejected,
            margin=_number(row, self.margin_column, where) if self.margin_column else 0.0,
            # Messages have a prompt of their own; only that of texts is found by comparing them.
            is_implicit=self._is_implicit(row) and isinstance(prompt, str),
            images=images,
        )

    @property
    def _response_columns(self) -> tuple[str, ...]:
        return (self.response_column,) if self.label_column else (self.chosen_column, self.rejected_column)

    def _truncated(self, responses: Sequence[str], row: Mapping[str, Any], where: str) -> frozenset[str]:
        """Return the responses that ended at a length limit; `chosen_truncated` says it of `chosen`."""
        truncated = set()
        for name, response in zip(self._response_columns, responses, strict=True):
            column = f"{name}{TRUNCATED}"
            # Of an empty response there is nothing else to learn than its end.
            if response and column in row and _label(row, column, where):
                truncated.add(response)
        return frozenset(truncated)

    def _is_implicit(self, row: Mapping[str, Any]) -> bool:
        """Return True if no column has the prompt."""
        return self.prompt_column is None and PROMPT not in row

    def _prompt_and_responses(
        self, row: Mapping[str, Any], where: str
    ) -> tuple[str | Messages, list[str], dict[str, Message | Messages]]:
        """Return the prompt, both responses or the labelled one, and the `response_messages` of the sample."""
        prompt: str | Messages | None = None
        if not self._is_implicit(row):
            prompt = prompt_cell(row, self.prompt_column or PROMPT, where)

        # Responses that are messages may contain their prompt, which must be the same in all of them.
        names = self._response_columns
        values = [prompt_cell(row, name, where) for name in names]
        n_common = _n_common_messages([value for value in values if not isinstance(value, str)])
        prompts: list[str | Messages | None] = []
        responses: list[str] = []
        whole_messages: dict[str, Message | Messages] = {}
        for name, value in zip(names, values, strict=True):
            if isinstance(value, str):
                prompts.append(prompt)
                responses.append(value)
                continue
            n_prompt = _n_of_prompt(value, prompt, n_common, f"{where}, column {name!r}")
            prompts.append(value[:n_prompt] or prompt)
            text, of_text = response_without_places(value[n_prompt:], f"{where}, column {name!r}")
            responses.append(text)
            whole_messages |= of_text
        if prompts[-1] != prompts[0]:
            raise DataPoolError(f"{where}: the messages before the response are not the same in both columns")

        # Texts without a prompt are whole dialogues, as in HH-RLHF: they have the prompt in common.
        prompt = prompts[0]
        if prompt is None:
            if self.label_column:
                raise DataPoolError(f"{where}: a response with a label needs a prompt; set prompt_column")
            prompt = common_beginning(*responses)
            responses = [response[len(prompt) :] for response in responses]
        return prompt, responses, whole_messages


def common_beginning(chosen: str, rejected: str) -> str:
    """Return the common beginning of two texts up to the end of a word; the rest begins with white space.

    Examples:
        >>> common_beginning("User: Is it so? Bot: Yes.", "User: Is it so? Bot: Yesterday it was.")
        'User: Is it so? Bot:'
    """
    beginning = chosen[: agreement(chosen, rejected)]

    # Back to the last white space: "Yes" and "Yesterday" begin alike, but their tokens are others.
    if beginning and not beginning[-1].isspace():
        beginning = beginning[: len(beginning) - len(beginning.split()[-1])]
    return beginning.rstrip()


def _n_common_messages(conversations: Sequence[Messages]) -> int:
    """Return the number of messages before the responses of one or two conversations.

    It is the longest common beginning that leaves a response, which begins with a message of the assistant.

    Examples:
        >>> user, good, bad = ({"role": role, "content": role} for role in ("user", "assistant", "assistant"))
        >>> _n_common_messages([[user, good, user, good], [user, good, user, bad | {"content": "No."}]])
        3
    """
    if len(conversations) < 2:
        return sum(len(conversation) - 1 for conversation in conversations)
    n = 0
    for message, other in zip(*(conversation[:-1] for conversation in conversations), strict=False):
        if message != other:
            break
        n += 1

    # A prompt that ends with a message of the assistant would leave nothing to respond to.
    while n and conversations[0][n - 1]["role"] == "assistant":
        n -= 1
    return n


def _n_of_prompt(messages: Messages, prompt: str | Messages | None, n_common: int, where: str) -> int:
    """Return how many messages are the prompt; the others are the response.

    Args:
        messages: the response, perhaps after its prompt.
        prompt: prompt of its own column, None if there is none.
        n_common: number of messages before the responses, without a column of the prompt.
        where: location, for messages of errors.
    """
    n = n_common
    if isinstance(prompt, list):
        n = len(prompt) if messages[: len(prompt)] == prompt else 0

    # A prompt as text is a message of the user, such as the last one in UltraFeedback.
    elif isinstance(prompt, str):
        while n and messages[n - 1]["content"] != prompt:
            n -= 1

    # Without its prompt, a response begins with a message of the assistant.
    if not n and prompt is None:
        raise DataPoolError(f"{where}: there is no message before the response, and no prompt")
    if not n and messages[0]["role"] != "assistant":
        raise DataPoolError(f"{where}: the messages before the response are not the prompt")

    response = messages[n:]
    if not response or response[0]["role"] != "assistant" or response[-1]["role"] != "assistant":
        raise DataPoolError(
            f"{where}: expected a response that begins and ends with a message of the assistant, got {shown(response)}"
        )
    return n


def _label(row: Mapping[str, Any], name: str, where: str) -> bool:
    value = cell(row, name, where)
    key = value.strip().lower() if isinstance(value, str) else value  # CSV files have texts: True, true, 1
    if not isinstance(key, str | int) or key not in _LABELS:
        raise DataPoolError(f"{where}, column {name!r}: expected true or false, got {shown(value)}")
    return _LABELS[key]


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = cell(row, name, where)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")

    # False for NaN, too, which a file may also contain.
    if not abs(number) < float("inf"):
        raise DataPoolError(f"{where}, column {name!r}: expected a finite number, got {shown(value)}")
    return number


class PreferencePool(TextGenPool):
    """Preferences of a table: JSON Lines, JSON, CSV or parquet files, or a dataset of the `datasets` library."""

    @classmethod
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that the package `datasets` is installed, if a dataset is named."""
        if args.get("dataset") is not None:
            require_extra("datasets", extra="data", needed_by=needed_by)

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return True if the preferences are in files, or in a dataset in a folder."""
        return args.get("dataset") is None or os.path.exists(with_home(args["dataset"]))

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        *,
        files: DataFiles,
        dataset: str | None = None,
        name: str | None = None,
        split_names: dict[str, str] | None = None,
        divided_split: str | None = None,
        columns: PreferenceColumns,
        row_format: RowFormat,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            dataset: instead of files: hub id of a dataset, or a folder written by `save_to_disk`.
            name: configuration of the dataset.
            split_names: `train`, `val`, `test` -> the dataset's names for them, if they are unusual.
            divided_split: split of the dataset that is divided into train, val and test; its other splits are not used.
            split_ratios: fractions of train, val and test if there is only one file, or the dataset has only one split,
                or with `divided_split`. A split with the fraction 0 is empty.
        """
        if split_names and divided_split is not None:
            raise DataPoolError("set one of `split_names` and `divided_split`")

        folder: Path | None
        if dataset is None:
            rows, source = files.rows(split, table_rows)
            folder = Path(source).parent
        elif files.path is None and files.data_files is None:
            rows, source, folder = dataset_rows(
                split, dataset, name=name, split_names=split_names, splitting=files, divided_split=divided_split
            )
        else:
            raise DataPoolError("set one of `path`, `data_files` and `dataset`")

        # An empty split is an error, unless it was asked for: preference runs may have no test split.
        formatted = row_format.read(rows, names_columns=columns.has_names, needs_pairs=True)
        if formatted.name == "prompt_completion":
            columns = replace(columns, label_column=LABEL, response_column=COMPLETION)
        preferences = columns.preferences(formatted, split, folder)
        pool = cls(list(preferences)) if files.is_left_out(split) else cls.of(preferences, split, source)
        pool.row_format = formatted.description
        return pool
