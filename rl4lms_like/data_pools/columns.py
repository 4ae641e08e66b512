"""Conversion of a table row to a sample.

    row     {"question": "Why?", "answers": ["Because.", "So."], "topic": "cause"}
    sample  prompt from `prompt_column`, references from `reference_columns`, meta_data from `meta_columns`

A dotted name selects a nested value: `translation.en` is `row["translation"]["en"]`. A text with a lone surrogate,
which JSON allows, is rejected because tokenizers cannot encode it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import shown


@dataclass(frozen=True)
class ColumnMap:
    """Mapping of table columns to the fields of a sample.

    Args:
        prompt_column: column with a text.
        reference_columns: columns with a text, a list of texts, or null for no reference.
        meta_columns: columns with any values.
        prompt_prefix: text prepended to every prompt.
        prompt_suffix: text appended to every prompt.
    """

    prompt_column: str
    reference_columns: tuple[str, ...] = ()
    meta_columns: tuple[str, ...] = ()
    prompt_prefix: str = ""
    prompt_suffix: str = ""

    @classmethod
    def of(
        cls,
        prompt_column: str,
        reference_column: str | Sequence[str] | None,
        meta_columns: Sequence[str] | None,
        prompt_prefix: str,
        prompt_suffix: str,
    ) -> ColumnMap:
        """Build the map from a pool's arguments, where a single name is accepted instead of a list."""
        references = [reference_column] if isinstance(reference_column, str) else reference_column or []
        return cls(prompt_column, tuple(references), tuple(meta_columns or ()), prompt_prefix, prompt_suffix)

    def sample(self, row: Mapping[str, Any], id: str, where: str) -> Sample:
        """Build the sample of a row.

        Args:
            row: column -> value.
            id: id of the sample.
            where: file and line, for messages.

        Raises:
            DataPoolError: a column is missing or does not hold text.
        """
        prompt = text_cell(row, self.prompt_column, where)
        references = [text for name in self.reference_columns for text in texts_cell(row, name, where)]
        meta_data = {name: cell(row, name, where) for name in self.meta_columns} or None
        return Sample(id, f"{self.prompt_prefix}{prompt}{self.prompt_suffix}", references, meta_data)


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
    if not isinstance(value, str):
        return False
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


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
