"""Tables in local files: JSON lines and CSV, plain or packed by gzip.

Both pools take the same arguments; see `columns` for what becomes of a row and `splits` for which rows go where.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.columns import ColumnMap
from rl4lms_like.data_pools.splits import file_of, not_empty, open_text, rows_of_split

_NumberedRow: TypeAlias = "tuple[int, Mapping[str, Any]]"
"""Line number, from 1, and row."""


class JsonlPool(TextGenPool):
    """Fields of a file with one JSON object a line."""

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
        """Builds the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            prompt_column: the field that holds the prompt; `a.b` reaches into nested objects.
            path: one file for all splits, shared out by `split_ratios`.
            data_files: one file for each split.
            reference_column: a field, or several, that hold references: a text, a list of texts or null.
            meta_columns: fields that rewards and metrics get as `meta_info`.
            prompt_prefix: put before every prompt.
            prompt_suffix: put behind every prompt.
            max_size: at most so many samples a split.
            split_ratios: shares of train, val and test, where they come from one file.
            seed: of the shuffle before sharing out.

        Raises:
            DataPoolError: a file, line or field cannot be read; the message names it.
        """
        columns = ColumnMap.of(prompt_column, reference_column, meta_columns, prompt_prefix, prompt_suffix)
        file, owned = file_of(split, path, data_files)
        rows = rows_of_split(
            _read(file, _json_rows), split, owned=owned, split_ratios=split_ratios, seed=seed, max_size=max_size
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
        """Builds the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            prompt_column: the column that holds the prompt.
            path: one file for all splits, shared out by `split_ratios`.
            data_files: one file for each split.
            reference_column: a column, or several, that hold one reference each.
            meta_columns: columns that rewards and metrics get as `meta_info`.
            prompt_prefix: put before every prompt.
            prompt_suffix: put behind every prompt.
            max_size: at most so many samples a split.
            split_ratios: shares of train, val and test, where they come from one file.
            seed: of the shuffle before sharing out.
            delimiter: what separates values; default: a tab in files named `.tsv` (`.tsv.gz`), else a comma.

        Raises:
            DataPoolError: a file, line or column cannot be read; the message names it.
        """
        columns = ColumnMap.of(prompt_column, reference_column, meta_columns, prompt_prefix, prompt_suffix)
        file, owned = file_of(split, path, data_files)
        separator = delimiter or ("\t" if ".tsv" in file.suffixes else ",")
        rows = rows_of_split(
            _read(file, partial(_csv_rows, delimiter=separator)),
            split,
            owned=owned,
            split_ratios=split_ratios,
            seed=seed,
            max_size=max_size,
        )
        return cls(_samples(rows, columns, split, file))


def _samples(rows: Iterator[tuple[int, _NumberedRow]], columns: ColumnMap, split: str, file: Path) -> list[Sample]:
    samples = [columns.sample(row, f"{split}_{index}", f"{file}, line {line}") for index, (line, row) in rows]
    return not_empty(samples, split, str(file))


def _read(file: Path, parse: Callable[[Iterator[str], Path], Iterator[_NumberedRow]]) -> Iterator[_NumberedRow]:
    with open_text(file) as lines:
        yield from parse(lines, file)


def _json_rows(lines: Iterator[str], file: Path) -> Iterator[_NumberedRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise DataPoolError(f"{file}, line {number}, character {error.colno}: not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise DataPoolError(f"{file}, line {number}: expected a JSON object, got {line.strip()[:60]}")
        yield number, row


def _csv_rows(lines: Iterator[str], file: Path, delimiter: str) -> Iterator[_NumberedRow]:
    table = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(table, [])
        for values in table:
            if values and len(values) != len(header):
                counts = f"{len(values)} values for {len(header)} columns"
                raise DataPoolError(f"{file}, line {table.line_num}: {counts} ({', '.join(header)})")
            if values:
                yield table.line_num, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataPoolError(f"{file}, line {table.line_num}: not CSV: {error}") from error
