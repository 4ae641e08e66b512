"""Readers of local files: rows of tables with their location, and the cells of a row.

    a.jsonl           one JSON object per line                      a.jsonl, line 7
    a.json            a list of objects; or JSON Lines              a.json, entry 7
    a.csv, a.tsv      values below a header line                    a.csv, line 7
    a.parquet         read by pyarrow (extra 'data')                a.parquet, row 7

All formats but parquet may be gzip-compressed (`a.jsonl.gz`). A repeated column in a header, or a repeated key in an
object, is an error, because all but one of the values would be lost.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from rl4lms_like.core.pictures import checked_part
from rl4lms_like.core.sample import SPOKEN_KEYS
from rl4lms_like.system.errors import DataPoolError, import_extra
from rl4lms_like.system.wording import excerpt, shown

TOOLS = "tools"
"""Default column of the tools that a model may call, if there is one."""

LocatedRow: TypeAlias = "tuple[str, Mapping[str, Any]]"
"""Location of a row (file and line), and the row: column -> value."""

_LONGEST_VALUE = 2**31 - 1  # Python's default limit of 131072 characters is too small for long documents


@contextmanager
def open_text(file: Path, newline: str | None = "") -> Iterator[TextIO]:
    """Open a UTF-8 text file, plain or gzip-compressed; by default any usual line ending is accepted, not translated.

    Raises:
        DataPoolError: it is a device or a pipe, or cannot be opened, decompressed or decoded. Read errors of other
            files inside the context are attributed to this file too; to read several files, use `text_lines`.
    """
    refuse_devices(file)
    open_file: Any = gzip.open if file.suffix.lower() == ".gz" else open

    # "utf-8-sig" skips the byte order mark that Excel writes; it would become part of the first column's name.
    try:
        with open_file(file, "rt", encoding="utf-8-sig", newline=newline) as lines:
            yield lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataPoolError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def refuse_devices(file: Path) -> None:
    """Raise a `DataPoolError` for a device such as `/dev/zero` or a pipe: reading it may never end."""
    # `os.path` returns False where the methods of `Path` can raise.
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        raise DataPoolError(f"cannot read {file}: it is a device or a pipe; give a regular file")


def text_lines(file: Path, newline: str | None = "\n") -> Iterator[str]:
    """Yield the lines of a text file with their line ends; arguments and errors are those of `open_text`."""
    with open_text(file, newline) as lines:
        yield from lines


def paired_lines(left: Path, right: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the line pairs of two parallel text files: the location, and both texts without their line ends."""
    # None stands for the end of the shorter file; an empty line is still a line end.
    for number, (left_line, right_line) in enumerate(zip_longest(text_lines(left), text_lines(right)), start=1):
        if left_line is None or right_line is None:
            shorter, longer = (left, right) if left_line is None else (right, left)
            raise DataPoolError(f"{shorter} has {number - 1} lines, {longer} has more: their lines must be parallel")
        yield f"{left}, line {number}", left_line.rstrip("\r\n"), right_line.rstrip("\r\n")


def table_rows(file: Path) -> Iterator[LocatedRow]:
    """Return the rows of a file; the format is determined by the end of its name.

    Raises:
        DataPoolError: it has another format, or cannot be read; the message names file and line.
        MissingExtraError: pyarrow is not installed, for a parquet file.
    """
    if (ending := file_ending(file)) not in READERS:
        raise DataPoolError(f"{file}: expected a file that ends with {', '.join('.' + known for known in READERS)}")
    return READERS[ending](file)


def first_row(file: Path) -> Mapping[str, Any]:
    """Return the first row of a file; errors as `table_rows`, and a `DataPoolError` for a file without rows."""
    for _, row in table_rows(file):
        return row
    raise DataPoolError(f"{file} has no rows")


def json_table_rows(file: Path) -> Iterator[LocatedRow]:
    """Return the rows of a parquet file, of a JSON file with a list of objects, or of JSON Lines of any name.

    Errors as `table_rows`.
    """
    ending = file_ending(file)
    if ending == "parquet":
        return parquet_rows(file)
    return json_rows(file) if ending == "json" and not _has_object_lines(file) else json_line_rows(file)


def _has_object_lines(file: Path) -> bool:
    """Return True if the first line that is not empty is a whole object, or there is none."""
    with open_text(file) as lines:
        first = next((line.strip() for line in lines if line.strip()), "")
    return not first or (first.startswith("{") and first.endswith("}"))


def file_ending(file: Path) -> str:
    """Return the end of a file's name that says its format, such as `jsonl`, without that of its compression."""
    return file.name.lower().removesuffix(".gz").rpartition(".")[2]


def json_line_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield the objects of a file with one JSON object per line; empty lines are skipped. Errors as `table_rows`."""
    with open_text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = _parsed(line.rstrip(), where)
            except json.JSONDecodeError as error:
                raise DataPoolError(f"{where}, character {error.colno}: not JSON: {error.msg}") from error

            # JSON of another kind, such as a number, is a valid line but has no columns.
            if not isinstance(row, dict):
                raise DataPoolError(f"{where}: expected a JSON object, got {line.strip()[:60]}")
            yield where, row


def json_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield the objects of a JSON file: a list of objects, an object with one list of objects, or JSON Lines."""
    with open_text(file) as lines:
        text = lines.read()

    # "Extra data" after a first complete value: the file is JSON Lines under the name of a JSON file.
    try:
        content = _parsed(text, str(file))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from json_line_rows(file)
            return
        raise DataPoolError(f"{file}, line {error.lineno}, character {error.colno}: not JSON: {error.msg}") from error

    # SQuAD's form, {"version": ..., "data": [{...}, ...]}: the rows are in the only list. Any other object is a row.
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list) and value]
        has_rows = len(lists) == 1 and isinstance(lists[0][0], dict)
        content = lists[0] if has_rows else [content]

    if not isinstance(content, list):
        raise DataPoolError(f"{file}: expected a list of JSON objects, got {text.strip()[:60]}")
    for number, row in enumerate(content):
        if not isinstance(row, dict):
            raise DataPoolError(f"{file}, entry {number}: expected a JSON object, got {str(row)[:60]}")
        yield f"{file}, entry {number}", row


def csv_rows(file: Path, delimiter: str | None = None) -> Iterator[LocatedRow]:
    """Yield the rows of delimiter-separated values with a header line; default: tabs in `.tsv` files, else commas."""
    csv.field_size_limit(_LONGEST_VALUE)
    if not delimiter:
        delimiter = "\t" if file_ending(file) == "tsv" else ","

    with open_text(file) as lines:
        table = csv.reader(lines, delimiter=delimiter, strict=True)  # strict: an open quote is an error
        try:
            header = next(table, [])
            _refuse_repeated(header, f"{file}, line {table.line_num}: the column")

            # Empty lines have no values. A quoted value may span lines: `line_num` is that of its end.
            for values in filter(None, table):
                where = f"{file}, line {table.line_num}"
                if len(values) != len(header):
                    counts = f"{len(values)} values for {len(header)} columns"
                    raise DataPoolError(f"{where}: {counts} ({', '.join(header)})")
                yield where, dict(zip(header, values, strict=True))
        except csv.Error as error:
            raise DataPoolError(f"{file}, line {table.line_num}: not CSV: {error}") from error


def parquet_rows(file: Path) -> Iterator[LocatedRow]:
    """Yield the rows of a parquet file; a `DataPoolError` for one that cannot be read or has a repeated column."""
    parquet = import_extra("pyarrow.parquet", extra="data", needed_by=f"reading {file.name}")
    refuse_devices(file)
    try:
        table = parquet.ParquetFile(file)
        _refuse_repeated(table.schema_arrow.names, f"{file}: the column")

        # In batches, because a whole table as Python objects may need several times the memory of the file.
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{file}, row {number}", row
                number += 1
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these two classes
        raise DataPoolError(f"cannot read {file}: {error}") from error


READERS: Mapping[str, Callable[[Path], Iterator[LocatedRow]]] = {
    "parquet": parquet_rows,
    "jsonl": json_line_rows,
    "json": json_rows,
    "csv": csv_rows,
    "tsv": csv_rows,
}
"""End of a file's name -> function that reads its rows, in order of precedence."""


def _parsed(text: str, where: str) -> Any:
    try:
        return _DECODER.decode(text)
    except DataPoolError as error:  # of `_object`, which has no location
        raise DataPoolError(f"{where}, {error}") from None
    except json.JSONDecodeError:  # whose position the caller adds
        raise
    except RecursionError:
        raise DataPoolError(f"{where}: not readable as JSON: nested too deeply") from None
    except ValueError as error:  # Python's limit of the digits of a number
        raise DataPoolError(f"{where}: not readable as JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; Python's decoder would keep the last of several equal keys."""
    row = dict(pairs)
    if len(row) < len(pairs):
        _refuse_repeated([key for key, _ in pairs], f"in {excerpt(row)}: the key")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # shared: building a decoder takes longer than decoding a line


def _refuse_repeated(names: list[str], what: str) -> None:
    """Raise a `DataPoolError` for repeated names; unnamed columns, which spreadsheets add, may be repeated."""
    repeated = ", ".join(repr(name) for name, count in Counter(names).items() if name and count > 1)
    if repeated:
        raise DataPoolError(f"{what} {repeated} occurs more than once; use distinct names")


def cell(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value in a column (`a.b`: a nested value), or raise a `DataPoolError` that suggests a similar one."""
    # A column with a dot in its name takes precedence over a nested value.
    if name in row:
        return row[name]

    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            columns = [str(column) for column in row]
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise DataPoolError(f"{where}: no column {name!r}{hint}; it has {', '.join(columns)}")
        value = value[key]
    return value


def text_cell(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text in a column, or raise a `DataPoolError` if there is none."""
    value = cell(row, name, where)
    if not _is_text(value):
        raise DataPoolError(f"{where}, column {name!r}: expected text, got {shown(value)}")
    return str(value)


def texts_cell(row: Mapping[str, Any], name: str, where: str) -> list[str]:
    """Return the texts in a column that holds a list of texts, one text, or null (no text); else a `DataPoolError`."""
    value = cell(row, name, where)
    if value is None:
        return []
    texts = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(_is_text(text) for text in texts):
        raise DataPoolError(f"{where}, column {name!r}: expected text or a list of texts, got {shown(value)}")
    return texts


def prompt_cell(row: Mapping[str, Any], name: str, where: str) -> str | list[dict[str, Any]]:
    """Return the text, or the list of messages with `role` and `content`, in a column; else a `DataPoolError`.

    A content is a text, or a list of parts: texts, images, and places of images.
    """
    value = cell(row, name, where)
    if isinstance(value, str):
        return text_cell(row, name, where)

    # `datasets` may store a list of messages column by column: {"role": [...], "content": [...]}.
    keys = list(value) if isinstance(value, Mapping) else []
    messages = dict_rows(value, keys, where)
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        kinds = "text or messages (role, content)"
        raise DataPoolError(f"{where}, column {name!r}: expected {kinds}, got {shown(value)}")
    return [_message(message, f"{where}, column {name!r}") for message in messages]


def _is_message(value: Any) -> bool:
    """Return True for a message with a content; the assistant's may have something else instead, such as tool calls."""
    if not isinstance(value, Mapping) or not _is_text(value.get("role")):
        return False
    if value.get("content") is None:
        return value["role"] == "assistant" and any(value.get(key) for keys in SPOKEN_KEYS for key in keys)
    return _is_text(value["content"]) or isinstance(value["content"], list)


def _message(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message with all its keys, except for those without a value."""
    # Tables give each row every key that any row has. Templates test whether a key is there.
    message = {key: entry for key, entry in value.items() if entry is not None}
    message.setdefault("content", None)
    if isinstance(message["content"], list):
        message["content"] = _content(message["content"], f"{where}: `content`")
    if "tool_calls" in message:
        message["tool_calls"] = _dicts(message["tool_calls"], f"{where}: `tool_calls`")
        if not message["tool_calls"]:
            del message["tool_calls"]
    return message


def _content(parts: list[Any], where: str) -> str | list[dict[str, Any]]:
    """Return the parts of a message; those of a message without images as one text."""
    contents: list[dict[str, Any]] = []
    for part in parts:
        try:
            contents.append(checked_part(part))
        except DataPoolError as error:
            raise DataPoolError(f"{where}: {error}") from None
        if not _is_text(contents[-1].get("text", "")):
            raise DataPoolError(f"{where}: expected text, got {shown(part)}")
    if all(part["type"] == "text" for part in contents):
        return "".join(part["text"] for part in contents)
    return contents


def tools_cell(row: Mapping[str, Any], name: str | None, where: str, *, is_chat: bool) -> list[dict[str, Any]] | None:
    """Return the tools in a column, a list of JSON objects or its text; else a `DataPoolError`.

    Without a name, they are those of the column `tools`, if there is one and the prompt is a chat.
    """
    if name is None:
        if not is_chat or TOOLS not in row:
            return None
        name = TOOLS
    value = cell(row, name, where)
    return None if value is None else _dicts(value, f"{where}, column {name!r}") or None


def _dicts(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects, which may be a text; keys without a value, which tables fill in, are removed."""
    if isinstance(value, str) and value.strip():
        try:
            value = _parsed(value, where)
        except json.JSONDecodeError as error:
            raise DataPoolError(f"{where}: not JSON: {error.msg}") from error
    if value == "":
        return []
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise DataPoolError(f"{where}: expected a list of JSON objects, got {shown(value)}")
    return [_without_nulls(entry) for entry in value]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def _is_text(value: Any) -> bool:
    """Return False also for a text with a lone surrogate, which JSON allows but tokenizers cannot encode."""
    try:
        return isinstance(value, str) and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:
        return False


def dict_rows(value: Any, names: Sequence[str], where: str) -> Any:
    """Return a list of dicts that `datasets` may have stored column by column; other values are left unchanged.

    {"role": ["user", "assistant"], "content": ["Hi.", "Hello."]}        is stored of
    [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    """
    if not isinstance(value, Mapping):
        return value
    columns = [cell(value, name, where) for name in names]

    # A single object is no table: its values are texts, which also have items and a length.
    is_table = all(isinstance(column, list) for column in columns)
    if not is_table or len({len(column) for column in columns}) != 1:
        return value
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
