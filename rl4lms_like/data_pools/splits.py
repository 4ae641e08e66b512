"""Assignment of rows to the splits train, val and test.

data_files  {train: a, val: b, test: c}     one file per split
path        one file for all                 its rows are shuffled with `seed` and divided by `split_ratios`
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.numbers import Count

SPLITS = ("train", "val", "test")

USUAL_NAMES = {"train": ("train",), "val": ("validation", "val", "valid", "dev"), "test": ("test",)}
"""Common names of the splits in published datasets."""

T = TypeVar("T")


@dataclass(frozen=True)
class Splitting:
    """Selection of the rows of a split.

    Args:
        max_size: maximum number of samples per split.
        split_ratios: fractions of train, val and test if all splits come from one file or table.
        seed: seed of the shuffle before splitting.
    """

    max_size: Count | None = None
    split_ratios: Sequence[float] = (0.8, 0.1, 0.1)
    seed: int = 0

    def of_all(self, n_rows: int, split: str) -> list[int]:
        """Return the row indices of a split; the splits are disjoint and cover all rows if the ratios add up to 1.

        Raises:
            DataPoolError: unknown split, or ratios that are not three fractions.
        """
        position, ratios = _position(split), self.split_ratios
        if len(ratios) != len(SPLITS) or min(ratios) < 0 or sum(ratios) > 1 + 1e-9:
            raise DataPoolError(
                f"split_ratios must be the fractions of {', '.join(SPLITS)}, each at least 0, together at most 1; "
                f"got {list(ratios)}"
            )
        order = np.random.default_rng(self.seed).permutation(n_rows)
        borders = [round(n_rows * sum(ratios[:count])) for count in range(len(SPLITS) + 1)]
        return [int(row) for row in order[borders[position] : borders[position + 1]]][: self.max_size]


@dataclass(frozen=True)
class DataFiles:
    """Files of a pool.

    Args:
        path: one file for all splits, divided by `split_ratios`.
        data_files: one file for each split.
    """

    path: str | None = None
    data_files: dict[str, str] | None = None

    def file(self, split: str) -> Path:
        """Return the file of a split.

        Raises:
            DataPoolError: unknown split, no file for it, or not exactly one of `path` and `data_files` is set.
        """
        _position(split)
        if self.path is not None and self.data_files is None:
            return with_home(self.path)
        if self.path is not None or self.data_files is None:
            raise DataPoolError("set either `path` (one file for all splits) or `data_files` (one file per split)")
        if split not in self.data_files:
            raise DataPoolError(f"data_files has no file for split {split!r}; it has {', '.join(self.data_files)}")
        return with_home(self.data_files[split])

    def rows(self, rows: Iterable[T], split: str, splitting: Splitting) -> Iterator[tuple[int, T]]:
        """Return the numbered rows of a split from those of its file; its own file is read only as far as needed."""
        if self.path is None:
            return islice(enumerate(rows), splitting.max_size)
        everything = list(rows)
        return ((row, everything[row]) for row in splitting.of_all(len(everything), split))


def names_of(split: str) -> tuple[str, ...]:
    """Return the common names of a split in published datasets.

    Raises:
        DataPoolError: unknown split.
    """
    return USUAL_NAMES[SPLITS[_position(split)]]


@contextmanager
def open_text(file: Path, newline: str | None = "") -> Iterator[TextIO]:
    """Open a UTF-8 text file, plain or gzip-compressed, as a context manager.

    Args:
        file: path of the file.
        newline: line ending, as for Python's `open`; default: any of the usual ones, not translated.

    Raises:
        DataPoolError: it is a device or a pipe, or cannot be opened, decompressed or decoded. Read errors of other
            files inside the context are attributed to this file too; to read several files, use `text_lines`.
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
    """Check a path before it is opened: reading a device such as `/dev/zero` or a pipe may never end.

    Raises:
        DataPoolError: the path is a device, a pipe or a socket.
    """
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):  # Path's versions can raise
        raise DataPoolError(f"cannot read {file}: it is a device or a pipe; give a regular file")


def text_lines(file: Path, newline: str | None = "\n") -> Iterator[str]:
    """Yield the lines of a text file with their line ends; arguments and errors are those of `open_text`."""
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
