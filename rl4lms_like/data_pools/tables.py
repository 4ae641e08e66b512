"""Readers of local table files; each row comes with its location, for messages.

    a.jsonl           one JSON object per line                      a.jsonl, line 7
    a.json            a list of objects; or JSON Lines              a.json, entry 7
    a.csv, a.tsv      values below a header line                    a.csv, line 7
    a.parquet         read by pyarrow (extra 'data')                a.parquet, row 7

All formats but parquet may be gzip-compressed (`a.jsonl.gz`). A repeated column in a header, or a repeated key in an
object, is an error, because all but one of the values would be lost.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.core.errors import DataPoolError, import_extra
from rl4lms_like.core.wording import excerpt
from rl4lms_like.data_pools.splits import open_text, text_lines

LocatedRow: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""Location of a row (file and line), and the row: column -> value."""

_LONGEST_VALUE = 2**31 - 1  # Python's default limit of 131072 characters is too small for long documents

FORMATS = ("parquet", "jsonl", "json", "csv", "tsv")
"""File name endings supported by `table_rows`, in order of precedence."""


def table_rows(file: Path) -> Iterator[LocatedRow]:
    """Return the rows of a file; the format is determined by the end of its name.

    Raises:
        DataPoolError: it cannot be read; the message names file and line.
        MissingExtraError: it is a parquet file and pyarrow is not installed.
    """
    name = file.name.lower().removesuffix(".gz")
    readers: dict[str, Callable[[Path], Iterator[LocatedRow]]] = {
        ".parquet": parquet_rows,
        ".jsonl": json_line_rows,
        ".json": json_rows,
        ".csv": csv_rows,
        ".tsv": csv_rows,
    }
    return readers[Path(name).suffix](file)


def json_line_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield the objects of a file with one JSON object per line; empty lines are skipped.

    Raises:
        DataPoolError: the file cannot be read, a line is not a JSON object, or an object has a repeated key.
    """
    with open_text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = _parsed(line.rstrip(), where)
            except json.JSONDecodeError as error:
                raise DataPoolError(f"{where}, character {error.colno}: not JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise DataPoolError(f"{where}: expected a JSON object, got {line.strip()[:60]}")
            yield where, row


def json_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield the objects of a JSON file: a list of objects, an object with one list of objects, or JSON Lines.

    Raises:
        DataPoolError: the file cannot be read, contains something else, or an object has a repeated key.
    """
    with open_text(file) as lines:
        text = lines.read()
    try:
        content = _parsed(text, str(file))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from json_line_rows(file)
            return
        raise DataPoolError(f"{file}, line {error.lineno}, character {error.colno}: not JSON: {error.msg}") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list) and value]
        content = lists[0] if len(lists) == 1 and isinstance(lists[0][0], dict) else [content]
    if not isinstance(content, list):
        raise DataPoolError(f"{file}: expected a list of JSON objects, got {text.strip()[:60]}")
    for number, row in enumerate(content):
        if not isinstance(row, dict):
            raise DataPoolError(f"{file}, entry {number}: expected a JSON object, got {str(row)[:60]}")
        yield f"{file}, entry {number}", row


def csv_rows(file: Path, delimiter: str | None = None) -> Iterator[LocatedRow]:
    """Yield the rows of a file of delimiter-separated values with a header line.

    Args:
        file: path of the file.
        delimiter: separator of values; default: a tab in files named `.tsv` (`.tsv.gz`), else a comma.

    Raises:
        DataPoolError: the file cannot be read, the header has a repeated column, or a row has more or fewer values than
            the header.
    """
    csv.field_size_limit(_LONGEST_VALUE)
    with open_text(file) as lines:
        is_tsv = file.name.lower().removesuffix(".gz").endswith(".tsv")
        table = csv.reader(lines, delimiter=delimiter or ("\t" if is_tsv else ","), strict=True)
        try:
            header = next(table, [])
            _refuse_repeated(header, f"{file}, line {table.line_num}", "the column")
            for values in table:
                where = f"{file}, line {table.line_num}"
                if values and len(values) != len(header):
                    counts = f"{len(values)} values for {len(header)} columns"
                    raise DataPoolError(f"{where}: {counts} ({', '.join(header)})")
                if values:
                    yield where, dict(zip(header, values, strict=True))
        except csv.Error as error:
            raise DataPoolError(f"{file}, line {table.line_num}: not CSV: {error}") from error


def parquet_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a parquet file.

    Raises:
        DataPoolError: the file cannot be read, or has a repeated column.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = import_extra("pyarrow.parquet", extra="data", needed_by=f"reading {file.name}")
    try:
        number = 0
        table = parquet.ParquetFile(file)
        _refuse_repeated(table.schema_arrow.names, str(file), "the column")
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{file}, row {number}", row
                number += 1
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these two classes
        raise DataPoolError(f"cannot read {file}: {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except _RepeatedKeyError as error:
        row = dict(error.pairs)
        _refuse_repeated([key for key, _ in error.pairs], f"{where}, in {excerpt(row)}", "the key")
        return row


class _RepeatedKeyError(Exception):
    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise _RepeatedKeyError(pairs)
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # shared: building a decoder takes longer than decoding a line


def _refuse_repeated(names: list[str], where: str, what: str) -> None:
    """Raise a `DataPoolError` for repeated names; unnamed columns, which spreadsheets add, may be repeated."""
    repeated = ", ".join(repr(name) for name, count in Counter(names).items() if name and count > 1)
    if repeated:
        raise DataPoolError(f"{where}: {what} {repeated} occurs more than once; use distinct names")


def paired_lines(left: Path, right: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the line pairs of two parallel text files: the location, and both texts without their line ends.

    Raises:
        DataPoolError: a file cannot be read, or one has fewer lines than the other.
    """
    for number, (here, there) in enumerate(zip_longest(text_lines(left), text_lines(right)), start=1):
        if here is None or there is None:
            shorter, longer = (left, right) if here is None else (right, left)
            raise DataPoolError(f"{shorter} has {number - 1} lines, {longer} has more: their lines must be parallel")
        yield f"{left}, line {number}", here.rstrip("\r\n"), there.rstrip("\r\n")
