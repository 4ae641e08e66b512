"""Conversion of a table row to a sample.

    row     {"question": "Why?", "answers": ["Because.", "So."], "topic": "cause"}
    sample  prompt from `prompt_column`, references from `reference_column`, meta_data from `meta_columns`

A dotted name selects a nested value: `translation.en` is `row["translation"]["en"]`. A text with a lone surrogate,
which JSON allows, is rejected because tokenizers cannot encode it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import shown


@dataclass(frozen=True)
class Columns:
    """Mapping of a table's columns to the fields of a sample.

    Args:
        reference_column: one or more columns with references: a text, a list of texts or null.
        meta_columns: columns that are passed to rewards and metrics as `meta_info`.
        prompt_prefix: text prepended to every prompt.
        prompt_suffix: text appended to every prompt.
    """

    reference_column: str | list[str] | None = None
    meta_columns: list[str] | None = None
    prompt_prefix: str = ""
    prompt_suffix: str = ""

    def sample(self, row: Mapping[str, Any], prompt_column: str, id: str, where: str) -> Sample:
        """Build the sample of a row.

        Args:
            row: column -> value.
            prompt_column: column with the prompt's text.
            id: id of the sample.
            where: file and line, for messages.

        Raises:
            DataPoolError: a column is missing or does not hold text.
        """
        prompt = f"{self.prompt_prefix}{text_cell(row, prompt_column, where)}{self.prompt_suffix}"
        names = [self.reference_column] if isinstance(self.reference_column, str) else self.reference_column or []
        references = [text for name in names for text in texts_cell(row, name, where)]
        meta_data = {name: cell(row, name, where) for name in self.meta_columns or ()}
        return Sample(id, prompt, references, meta_data or None)


def text_cell(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text in a column.

    Raises:
        DataPoolError: there is no such column, or it does not hold text.
    """
    value = cell(row, name, where)
    if not _is_text(value):
        raise DataPoolError(f"{where}, column {name!r}: expected text, got {shown(value)}")
    return str(value)


def texts_cell(row: Mapping[str, Any], name: str, where: str) -> list[str]:
    """Return the texts in a column that holds a list of texts, one text, or null (no text).

    Raises:
        DataPoolError: there is no such column, or it holds something else.
    """
    value = cell(row, name, where)
    if value is None:
        return []
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(_is_text(text) for text in texts):
        raise DataPoolError(f"{where}, column {name!r}: expected text or a list of texts, got {shown(value)}")
    return texts


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def cell(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value in a column; `a.b` selects a nested value.

    Raises:
        DataPoolError: there is no such column; the message suggests the most similar one.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = difflib.get_close_matches(name, [str(column) for column in row], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            columns = ", ".join(str(column) for column in row)
            raise DataPoolError(f"{where}: no column {name!r}{hint}; it has {columns}")
        value = value[part]
    return value
