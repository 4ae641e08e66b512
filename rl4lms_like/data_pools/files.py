"""Pools of local table files: JSON Lines and CSV, plain or gzip-compressed.

See `columns` for the conversion of rows to samples and `splits` for the assignment of rows to splits.
"""

from __future__ import annotations

from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.columns import Columns
from rl4lms_like.data_pools.splits import DataFiles, Splitting
from rl4lms_like.data_pools.tables import csv_rows, json_line_rows


class JsonlPool(TextGenPool):
    """Fields of a file with one JSON object per line."""

    @classmethod
    @flattened
    def prepare(
        cls, split: str, prompt_column: str, *, files: DataFiles, columns: Columns, splitting: Splitting
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            prompt_column: the field that holds the prompt; `a.b` selects a nested field.
            reference_column: one or more fields with references: a text, a list of texts or null.
            meta_columns: fields that are passed to rewards and metrics as `meta_info`.
        """
        file = files.file(split)
        rows = files.rows(json_line_rows(file), split, splitting)
        samples = (columns.sample(row, prompt_column, f"{split}_{index}", where) for index, (where, row) in rows)
        return cls.of(samples, split, str(file))


class CsvPool(TextGenPool):
    """Columns of a file of comma-separated values with a header line."""

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        prompt_column: str,
        *,
        files: DataFiles,
        columns: Columns,
        splitting: Splitting,
        delimiter: str | None = None,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            prompt_column: the column that holds the prompt.
            reference_column: one or more columns with one reference each.
            delimiter: separator of values; default: a tab in files named `.tsv` (`.tsv.gz`), else a comma.
        """
        file = files.file(split)
        rows = files.rows(csv_rows(file, delimiter), split, splitting)
        samples = (columns.sample(row, prompt_column, f"{split}_{index}", where) for index, (where, row) in rows)
        return cls.of(samples, split, str(file))
