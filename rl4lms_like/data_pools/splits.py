"""Which rows belong to which split.

data_files  {train: a, val: b, test: c}     one file a split
path        one file for all                 its rows are shuffled by `seed` and shared out by `split_ratios`
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import DataPoolError

SPLITS = ("train", "val", "test")

USUAL_NAMES = {"train": ("train",), "val": ("validation", "val", "valid", "dev"), "test": ("test",)}
"""What data sets call the splits."""

T = TypeVar("T")


def share_of(n_rows: int, split: str, ratios: Sequence[float], seed: int) -> list[int]:
    """The rows of a split; the three splits are disjoint, and cover all rows if the ratios add up to 1.

    Args:
        n_rows: rows to share out.
        split: `train`, `val` or `test`.
        ratios: the shares of the three.
        seed: of the shuffle.

    Raises:
        DataPoolError: unknown split, or ratios that are not three shares.
    """
    position = _position(split)
    if len(ratios) != len(SPLITS) or min(ratios) < 0 or sum(ratios) > 1 + 1e-9:
        raise DataPoolError(
            f"split_ratios must be the shares of {', '.join(SPLITS)}, each at least 0, together at most 1; "
            f"got {list(ratios)}"
        )
    order = np.random.default_rng(seed).permutation(n_rows)
    borders = [round(n_rows * sum(ratios[:count])) for count in range(len(SPLITS) + 1)]
    return [int(row) for row in order[borders[position] : borders[position + 1]]]


def file_of(split: str, path: str | None, data_files: Mapping[str, str] | None) -> tuple[Path, bool]:
    """The file that a split is read from, and whether the split owns all of it.

    Raises:
        DataPoolError: unknown split, no file for it, or both ways of naming files at once.
    """
    _position(split)
    if (path is None) == (data_files is None):
        raise DataPoolError("give either `path` (one file for all splits) or `data_files` (one file a split)")
    if path is not None:
        return with_home(path), False
    assert data_files is not None
    if split not in data_files:
        raise DataPoolError(f"data_files names no file for split {split!r}; it has {', '.join(data_files)}")
    return with_home(data_files[split]), True


def rows_of_split(
    rows: Iterable[T], split: str, *, owned: bool, split_ratios: Sequence[float], seed: int, max_size: int | None
) -> Iterator[tuple[int, T]]:
    """Numbered rows of a split, at most `max_size`; reads no further than it must."""
    if owned:
        return islice(enumerate(rows), max_size)
    everything = list(rows)
    chosen = share_of(len(everything), split, split_ratios, seed)[:max_size]
    return ((row, everything[row]) for row in chosen)


def names_of(split: str) -> tuple[str, ...]:
    """What data sets call a split.

    Raises:
        DataPoolError: unknown split.
    """
    return USUAL_NAMES[SPLITS[_position(split)]]


def not_empty(samples: list[T], split: str, source: str) -> list[T]:
    """The samples, if there are any.

    Raises:
        DataPoolError: there are none.
    """
    if not samples:
        raise DataPoolError(f"{source}: no samples for split {split!r}; the file is empty or its share is too small")
    return samples


@contextmanager
def open_text(file: Path, newline: str | None = "") -> Iterator[TextIO]:
    """A UTF-8 text file, also one packed by gzip, for as long as the context lasts.

    Args:
        file: its path.
        newline: what ends a line, as for Python's `open`; default: any of the usual, left as it is.

    Raises:
        DataPoolError: it is a device or a pipe, or cannot be opened, unpacked or decoded. Inside the context, errors of
            other files are taken for its own: to read several at a time, see `text_lines`.
    """
    refuse_devices(file)
    try:
        with _opened(file, newline) as lines:
            yield lines
    except OSError as error:
        raise DataPoolError(f"cannot read {file}: {error.strerror or error}") from error
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataPoolError(f"cannot read {file}: {error}") from error


def refuse_devices(file: Path) -> None:
    """Looks at a path before it is opened: a device such as `/dev/zero` has no end, and a pipe may wait for ever.

    Raises:
        DataPoolError: the path is a device, a pipe or a socket.
    """
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):  # unlike Path's, they never raise
        raise DataPoolError(f"cannot read {file}: it is a device or a pipe; give a regular file")


def text_lines(file: Path, newline: str | None = "\n") -> Iterator[str]:
    """The lines of a text file, with their ends; arguments and errors are those of `open_text`."""
    with open_text(file, newline) as lines:
        yield from lines


def _opened(file: Path, newline: str | None) -> TextIO:
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", newline=newline)
    return file.open(encoding="utf-8-sig", newline=newline)


def _position(split: str) -> int:
    if split not in SPLITS:
        raise DataPoolError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return SPLITS.index(split)
