"""Pools of local files: JSON, CSV, parquet and plain text, plain or gzip-compressed.

    row     {"question": "Why?", "answers": ["Because.", "So."], "topic": "cause"}
    sample  prompt from `prompt_column`, references from `reference_column`, meta_data from `meta_columns`

A dotted name selects a nested value: `translation.en` is `row["translation"]["en"]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rl4lms_like.core.sample import Learned, Message, Sample
from rl4lms_like.data_pools.base import Pool, TextGenPool, flattened
from rl4lms_like.data_pools.formats import MESSAGES, PROMPT, RESPONSE, RowFormat
from rl4lms_like.data_pools.images import PictureColumns, response_without_places
from rl4lms_like.data_pools.splits import Splitting, names_of
from rl4lms_like.data_pools.tables import (
    LocatedRow,
    cell,
    csv_rows,
    json_table_rows,
    open_text,
    prompt_cell,
    texts_cell,
    tools_cell,
)
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Count

_WORD = re.compile(r"\S+")
_SENTENCE = re.compile(r"\S.*?[.!?][\"'”’)]*(?=\s|$)", re.DOTALL)

T = TypeVar("T")


@dataclass(frozen=True)
class Columns:
    """Mapping of a table's columns to the fields of a sample.

    Args:
        reference_column: one or more columns with references: a text, a list of texts or null.
        meta_columns: columns that are passed to rewards and metrics as `meta_info`.
        prompt_prefix: text prepended to every prompt.
        prompt_suffix: text appended to every prompt.
        last_message_as_reference: prompts are messages, of which the last one, the assistant's, is a reference.
        tools_column: column with the tools that the model may call, for the chat template; default: with prompts that
            are messages, `tools`, if there is one.
        image_column: one or more columns with the images of the prompt: the path of a file, relative to the data file;
            bytes; a `data:` URL; or a list of these. `<image>` in the prompt marks their places; without it, they come
            first.
    """

    reference_column: str | list[str] | None = None
    meta_columns: list[str] | None = None
    prompt_prefix: str = ""
    prompt_suffix: str = ""
    last_message_as_reference: bool = False
    tools_column: str | None = None
    image_column: str | list[str] | None = None

    def pool(
        self,
        pool_class: type[Pool],
        rows: Iterable[tuple[int, LocatedRow]],
        row_format: RowFormat,
        *,
        prompt_column: str | None,
        split: str,
        source: str,
        folder: Path | None,
    ) -> Pool:
        """Return the pool of numbered rows: those of named columns, or of a published format.

        Relative paths of images are those in `folder`; None = the working directory.

        Raises:
            DataPoolError: neither a column nor a format gives the prompts, or a row does not fit.
        """
        formatted = row_format.read(rows, names_columns=prompt_column is not None, needs_names=True)
        samples = self.samples(
            formatted,
            prompt_column or PROMPT,
            split,
            source_column=MESSAGES if formatted.name == "messages" else None,
            folder=folder,
            has_response=formatted.name != "columns",
            learned="conversation" if self.last_message_as_reference else formatted.learned,
        )

        # Rows are read here, and those left out are counted: the description has their number only afterwards.
        pool = pool_class.of(samples, split, source)
        pool.row_format = formatted.description
        return pool

    def samples(
        self,
        rows: Iterable[tuple[int, LocatedRow]],
        prompt_column: str,
        split: str,
        *,
        source_column: str | None = None,
        folder: Path | None = None,
        has_response: bool = False,
        learned: Learned = "response",
    ) -> Iterator[Sample]:
        """Yield the sample of each numbered row; a column that is missing or not text is a `DataPoolError`.

        Images that cannot be read are one error, after the last row.

        With `has_response`, the rows are those of a published format, whose response is a reference. Messages name
        `source_column` as the column that the prompts were converted from. `learned` is that of the samples.
        """
        if learned == "text" and (self.prompt_prefix or self.prompt_suffix):
            raise DataPoolError("prompt_prefix and prompt_suffix: the format text has no prompts")
        if learned == "text" and self.image_column:
            raise DataPoolError("image_column: the format text has no prompts, which images are a part of")
        pictures = PictureColumns(self.image_column, folder)

        for index, (where, row) in rows:
            prompt, references, whole_messages = self._read(row, prompt_column, where, has_response=has_response)
            meta_data = {name: cell(row, name, where) for name in self.meta_columns or ()}
            if isinstance(prompt, str):
                prompt = f"{self.prompt_prefix}{prompt}{self.prompt_suffix}"
            elif self.prompt_prefix or self.prompt_suffix:
                raise DataPoolError(f"{where}: prompt_prefix and prompt_suffix are for texts, not for messages")

            # One that is wrong is reported after the last row, with all others.
            illustrated = pictures.illustrated(prompt, references, row, where, column=source_column or prompt_column)
            if illustrated is None:
                continue
            prompt, images = illustrated

            # The number is that of the row in its file, so an id means the same row whatever the split ratios are.
            sample_id = f"{split}_{index}"
            tools = tools_cell(row, self.tools_column, where, is_chat=not isinstance(prompt, str))
            if isinstance(prompt, str):
                sample = Sample(sample_id, prompt, references, meta_data or None, tools=tools, images=images)
            else:
                sample = Sample.of_messages(sample_id, prompt, references, meta_data or None, tools, images)
            yield replace(sample, response_messages=whole_messages, learned=learned)

        pictures.raise_errors()

    def _read(
        self, row: Mapping[str, Any], prompt_column: str, where: str, *, has_response: bool
    ) -> tuple[str | list[Message], list[str], dict[str, Message | list[Message]]]:
        """Return the prompt of a row, its references, and `response_messages` of the sample."""
        prompt = prompt_cell(row, prompt_column, where)
        names = self.reference_column or []
        references: list[str] = []
        for name in [names] if isinstance(names, str) else names:
            references += texts_cell(row, name, where)

        # Tables of supervised fine-tuning keep the answer as the last message of the dialogue.
        whole_messages: dict[str, Message | list[Message]] = {}
        if self.last_message_as_reference:
            prompt, last = _without_last(prompt, f"{where}, column {prompt_column!r}")
            reference, whole_messages = response_without_places([last], where)
            references.append(reference)

        # That of a published format is a text or a message.
        elif has_response and row[RESPONSE] is not None:
            response = row[RESPONSE]
            if isinstance(response, Mapping):
                response, whole_messages = response_without_places([dict(response)], where)
            references.append(response)
        return prompt, references, whole_messages


def _without_last(prompt: str | list[dict[str, Any]], where: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages before the last one, and the last one."""
    if isinstance(prompt, str) or len(prompt) < 2 or prompt[-1]["role"] != "assistant":
        raise DataPoolError(f"{where}: last_message_as_reference needs messages, of which the last is the assistant's")
    return prompt[:-1], prompt[-1]


@dataclass(frozen=True)
class DataFiles(Splitting):
    """Files of a pool, and the division of a file for all splits.

    Args:
        path: one file for all splits, shuffled with `seed` and divided by `split_ratios`.
        data_files: one file for each split; a split whose file is null is empty.
    """

    path: str | None = None
    data_files: dict[str, str | None] | None = None

    def is_empty(self, split: str) -> bool:
        """Return True if the file of a split is null."""
        return self.data_files is not None and split in self.data_files and self.data_files[split] is None

    def is_left_out(self, split: str) -> bool:
        """Return True if the file of a split is null, or its fraction is 0."""
        # The fractions are checked also where files give the splits.
        is_without_rows = super().is_left_out(split)
        return is_without_rows or self.is_empty(split)

    def file(self, split: str) -> Path:
        """Return the file of a split; a `DataPoolError` if not exactly one of `path` and `data_files` gives it."""
        names_of(split)
        if self.path is not None and self.data_files is None:
            return with_home(self.path)
        if self.path is not None or self.data_files is None:
            raise DataPoolError("set either `path` (one file for all splits) or `data_files` (one file per split)")
        file = self.data_files.get(split)
        if file is None:
            files = ", ".join(self.data_files)
            raise DataPoolError(f"data_files has no file for split {split!r}, it has {files}; null makes it empty")
        return with_home(file)

    def rows(self, split: str, read: Callable[[Path], Iterable[T]]) -> tuple[Iterator[tuple[int, T]], str]:
        """Return the numbered rows of a split and its file; a file of its own is read only as far as needed."""
        if self.is_empty(split):
            return iter(()), f"data_files.{split}"
        file = self.file(split)
        if self.path is None:
            return islice(enumerate(islice(read(file), self.max_rows)), self.max_size), str(file)

        # Shuffling needs the number of rows, hence the whole file or its first `max_rows`.
        all_rows = list(islice(read(file), self.max_rows))
        return ((index, all_rows[index]) for index in self.of_all(len(all_rows), split)), str(file)


class JsonlPool(TextGenPool):
    """Fields of a file with one JSON object per line, with a JSON list of objects (`.json`), or of a parquet file."""

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        prompt_column: str | None = None,
        *,
        files: DataFiles,
        columns: Columns,
        row_format: RowFormat,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            prompt_column: the field that holds the prompt; `a.b` selects a nested field. Required without a `format`.
            reference_column: one or more fields with references: a text, a list of texts or null.
            meta_columns: fields that are passed to rewards and metrics as `meta_info`.
        """
        if files.is_empty(split):
            return cls([])
        rows, source = files.rows(split, json_table_rows)
        folder = files.file(split).parent  # of relative paths
        return columns.pool(
            cls, rows, row_format, prompt_column=prompt_column, split=split, source=source, folder=folder
        )


class CsvPool(TextGenPool):
    """Columns of a file of comma-separated values with a header line."""

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        prompt_column: str | None = None,
        *,
        files: DataFiles,
        columns: Columns,
        row_format: RowFormat,
        delimiter: str | None = None,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            prompt_column: the column that holds the prompt. Required without a `format`.
            reference_column: one or more columns with one reference each.
            delimiter: separator of values; default: a tab in files named `.tsv` (`.tsv.gz`), else a comma.
        """
        if files.is_empty(split):
            return cls([])
        rows, source = files.rows(split, partial(csv_rows, delimiter=delimiter))
        folder = files.file(split).parent  # of relative paths
        return columns.pool(
            cls, rows, row_format, prompt_column=prompt_column, split=split, source=source, folder=folder
        )


class TextPool(TextGenPool):
    """Texts of a plain-text file: one per line, or separated by a given string.

    text       Once upon a time there was a cat. It slept.
    prompt     Once upon a time                              prompt_words: 4
    reference  there was a cat. It slept.
    """

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        *,
        files: DataFiles,
        separator: str | None = None,
        prompt_words: Count | None = None,
        prompt_sentences: Count | None = None,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            separator: separator of texts, such as `<|endoftext|>`; default: the end of a line.
            prompt_words: number of words of each text in the prompt.
            prompt_sentences: number of sentences of each text in the prompt, instead of words. Default: the whole text.
            prompt_prefix: text prepended to every prompt.
            prompt_suffix: text appended to every prompt.
        """
        if prompt_words and prompt_sentences:
            raise DataPoolError("set prompt_words or prompt_sentences, not both")
        unit = _SENTENCE if prompt_sentences else _WORD
        n_units = prompt_sentences or prompt_words

        if files.is_empty(split):
            return cls([])
        rows, source = files.rows(split, partial(_texts, separator=separator))
        samples = []
        for index, text in rows:
            opening, continuation = _cut(text, unit, n_units)
            prompt = f"{prompt_prefix}{opening}{prompt_suffix}"
            # A text that is a prompt as a whole has no reference: an empty one would count as a text to compare with.
            samples.append(Sample(f"{split}_{index}", prompt, [continuation] if continuation else []))
        return cls.of(samples, split, source)


def _texts(file: Path, separator: str | None) -> Iterator[str]:
    """Yield the texts of a file, stripped; empty texts are skipped."""
    with open_text(file, newline=None) as lines:
        texts = lines if separator is None else lines.read().split(separator)
        for text in texts:
            if stripped := text.strip():
                yield stripped


def _cut(text: str, unit: re.Pattern[str], n_units: int | None) -> tuple[str, str]:
    """Split a text after its first `n_units` words or sentences; a shorter text is returned whole."""
    if n_units is None:
        return text, ""

    # White space between both is dropped: neither the prompt nor the reference keeps it.
    last = next(islice(unit.finditer(text), n_units - 1, None), None)
    end = last.end() if last else len(text)
    return text[:end], text[end:].strip()
