"""Pool of preferences: pairs of a better and a worse response to a prompt, or single responses with a label.

    pair     {"prompt": "I saw it", "chosen": "and loved it.", "rejected": "and left."}
    pair     {"chosen": "I saw it and loved it.", "rejected": "I saw it and left."}       prompt: common beginning
    pair     {"chosen": [user, assistant], "rejected": [user, assistant]}                 prompt: messages
    label    {"prompt": "I saw it", "response": "and left.", "label": false}

Responses are texts, or lists of messages that end with one of the assistant. The better response is the sample's
reference, so that a supervised run can learn from it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import DataPoolError, require_extra
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.core.wording import shown
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.files import DataFiles
from rl4lms_like.data_pools.hf_dataset import dataset_rows
from rl4lms_like.data_pools.tables import LocatedRow, cell, prompt_cell, table_rows

Messages: TypeAlias = "list[dict[str, Any]]"
PROMPT = "prompt"  # default column of the prompt, if there is one
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
    """

    prompt_column: str | None = None
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    label_column: str | None = None
    response_column: str = "response"
    margin_column: str | None = None

    def preferences(self, rows: Iterable[tuple[int, LocatedRow]], split: str) -> Iterator[Preference]:
        """Yield the preference of each numbered row; missing or unfit values are a `DataPoolError`."""
        for index, (where, row) in rows:
            yield self._preference(f"{split}_{index}", row, where)

    def _preference(self, id: str, row: Mapping[str, Any], where: str) -> Preference:
        given = self._prompt(row, where)
        names = (self.response_column,) if self.label_column else (self.chosen_column, self.rejected_column)
        cells = [prompt_cell(row, name, where) for name in names]
        parts = [_parts(value, given, f"{where}, column {name!r}") for name, value in zip(names, cells, strict=True)]
        prompt, texts = parts[0][0], [text for _, text in parts]
        if any(other != prompt for other, _ in parts):
            raise DataPoolError(f"{where}: the messages before the last one are not the same in both responses")
        if prompt is None:
            if self.label_column:
                raise DataPoolError(f"{where}: a response with a label needs a prompt; set prompt_column")
            prompt = common_beginning(*texts)
            texts = [text[len(prompt) :] for text in texts]
        is_good = self.label_column is None or _label(row, self.label_column, where)
        references = texts[:1] if is_good else []
        rejected = None if self.label_column and is_good else texts[-1]
        sample = Sample(id, prompt) if isinstance(prompt, str) else Sample.of_messages(id, prompt)
        return Preference(
            id,
            sample.prompt_or_input_text,
            references,
            messages=sample.messages,
            rejected=rejected,
            margin=_number(row, self.margin_column, where) if self.margin_column else 0.0,
            is_implicit=given is None,
        )

    def _prompt(self, row: Mapping[str, Any], where: str) -> str | Messages | None:
        if self.prompt_column is None and PROMPT not in row:
            return None
        return prompt_cell(row, self.prompt_column or PROMPT, where)


def common_beginning(chosen: str, rejected: str) -> str:
    """Return the common beginning of two texts up to the end of a word; the rest begins with white space.

    Example:
        >>> common_beginning("User: Is it so? Bot: Yes.", "User: Is it so? Bot: Yesterday it was.")
        'User: Is it so? Bot:'
    """
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    beginning = chosen[:n]
    if beginning and not beginning[-1].isspace():
        beginning = beginning[: len(beginning) - len(beginning.split()[-1])]
    return beginning.rstrip()


def _parts(value: str | Messages, given: str | Messages | None, where: str) -> tuple[str | Messages | None, str]:
    """Return the prompt and the text of a response, a text or messages; None if nothing says what the prompt is."""
    if isinstance(value, str):
        return given, value
    if value[-1]["role"] != "assistant":
        raise DataPoolError(f"{where}: expected messages that end with one of the assistant, got {shown(value)}")
    before, text = value[:-1], str(value[-1]["content"])
    if not before:
        if given is None:
            raise DataPoolError(f"{where}: there is no message before the response, and no prompt")
        return given, text
    is_given = given is None or before == given or (isinstance(given, str) and before[-1]["content"] == given)
    if not is_given:
        raise DataPoolError(f"{where}: the messages before the response are not the prompt")
    return before, text


def _label(row: Mapping[str, Any], name: str, where: str) -> bool:
    value = cell(row, name, where)
    key = value.strip().lower() if isinstance(value, str) else value
    if not isinstance(key, str | int) or key not in _LABELS:
        raise DataPoolError(f"{where}, column {name!r}: expected true or false, got {shown(value)}")
    return _LABELS[key]


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = cell(row, name, where)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
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
        if dataset is None:
            rows, source = files.rows(split, table_rows)
        elif files.path is None and files.data_files is None:
            rows, source = dataset_rows(split, dataset, name, None, split_names, files, divided_split)
        else:
            raise DataPoolError("set one of `path`, `data_files` and `dataset`")
        if files.is_left_out(split):
            return cls(list(columns.preferences(rows, split)))
        return cls.of(columns.preferences(rows, split), split, source)
