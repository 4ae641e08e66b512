"""Pools of local table files: JSON Lines and CSV, plain or gzip-compressed.

See `columns` for the conversion of rows to samples and `splits` for the assignment of rows to splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.columns import ColumnMap
from rl4lms_like.data_pools.splits import file_of, not_empty, rows_of_split
from rl4lms_like.data_pools.tables import LocatedRow, csv_rows, json_line_rows


class JsonlPool(TextGenPool):
    """Fields of a file with one JSON object per line."""

    @classmethod
    def prepare(
        cls,
        split: str,
        prompt_column: str,
        path: str | None = None,
        data_files: dict[str, str] | None = None,
        reference_column: str | list[str] | None = None,
        meta_columns: list[str] | None = None,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
        max_size: Count | None = None,
        split_ratios: Sequence[float] = (0.8, 0.1, 0.1),
        seed: int = 0,
    ) -> JsonlPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            prompt_column: the field that holds the prompt; `a.b` selects a nested field.
            path: one file for all splits, divided by `split_ratios`.
            data_files: one file for each split.
            reference_column: one or more fields with references: a text, a list of texts or null.
            meta_columns: fields that are passed to rewards and metrics as `meta_info`.
            prompt_prefix: text prepended to every prompt.
            prompt_suffix: text appended to every prompt.
            max_size: maximum number of samples per split.
            split_ratios: fractions of train, val and test if they come from one file.
            seed: seed of the shuffle before splitting.

        Raises:
            DataPoolError: a file, line or field cannot be read; the message names it.
        """
        columns = ColumnMap.of(prompt_column, reference_column, meta_columns, prompt_prefix, prompt_suffix)
        file, owned = file_of(split, path, data_files)
        rows = rows_of_split(
            json_line_rows(file), split, owned=owned, split_ratios=split_ratios, seed=seed, max_size=max_size
        )
        return cls(_samples(rows, columns, split, file))


class CsvPool(TextGenPool):
    """Columns of a file of comma-separated values with a header line."""

    @classmethod
    def prepare(
        cls,
        split: str,
        prompt_column: str,
        path: str | None = None,
        data_files: dict[str, str] | None = None,
        reference_column: str | list[str] | None = None,
        meta_columns: list[str] | None = None,
        prompt_prefix: str = "",
        prompt_suffix: str = "",
        max_size: Count | None = None,
        split_ratios: Sequence[float] = (0.8, 0.1, 0.1),
        seed: int = 0,
        delimiter: str | None = None,
    ) -> CsvPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            prompt_column: the column that holds the prompt.
            path: one file for all splits, divided by `split_ratios`.
            data_files: one file for each split.
            reference_column: one or more columns with one reference each.
            meta_columns: columns that are passed to rewards and metrics as `meta_info`.
            prompt_prefix: text prepended to every prompt.
            prompt_suffix: text appended to every prompt.
            max_size: maximum number of samples per split.
            split_ratios: fractions of train, val and test if they come from one file.
            seed: seed of the shuffle before splitting.
            delimiter: separator of values; default: a tab in files named `.tsv` (`.tsv.gz`), else a comma.

        Raises:
            DataPoolError: a file, line or column cannot be read; the message names it.
        """
        columns = ColumnMap.of(prompt_column, reference_column, meta_columns, prompt_prefix, prompt_suffix)
        file, owned = file_of(split, path, data_files)
        rows = rows_of_split(
            csv_rows(file, delimiter),
            split,
            owned=owned,
            split_ratios=split_ratios,
            seed=seed,
            max_size=max_size,
        )
        return cls(_samples(rows, columns, split, file))


def _samples(rows: Iterator[tuple[int, LocatedRow]], columns: ColumnMap, split: str, file: Path) -> list[Sample]:
    samples = [columns.sample(row, f"{split}_{index}", where) for index, (where, row) in rows]
    return not_empty(samples, split, str(file))
