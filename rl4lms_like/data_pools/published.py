"""A published data set, wherever its copy is: rows with the columns that it has on the hub.

    data_dir given    the set's own files (`layouts`), else what `save_to_disk` wrote, else table files of each split
    otherwise         the hub's table, by default the one that is known to work

    table files       train.jsonl   validation.jsonl   test.jsonl         or .parquet, .json, .csv, .tsv, or packed
                      data/train-00000-of-00002.parquet ...               as repositories of the hub have them
                      default/train/0000.parquet ...                      as its conversions have them

`val` is found under `validation`, `val`, `valid` and `dev`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import DataPoolError, require_extra
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.hub import HubTable, saved_tables, table_rows_of
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import FORMATS, LocatedRow, table_rows

Find: TypeAlias = "Callable[[Path, str], Iterator[LocatedRow] | None]"
"""Folder and split -> its rows, or nothing if the folder has no such files."""


@dataclass(frozen=True)
class Layout:
    """Files in which a data set was published.

    Args:
        files: their names, for the message to whom has none of them.
        find: reads them.
    """

    files: str
    find: Find


@dataclass(frozen=True)
class Source:
    """Where a user wants a data set from: the arguments that every pool of a published data set takes.

    Args:
        data_dir: folder of a local copy.
        hub_id: another repository of the hub with the same columns.
        hub_config: its configuration.
        revision: branch, tag or commit.
    """

    data_dir: str | None = None
    hub_id: str | None = None
    hub_config: str | None = None
    revision: str | None = None

    def table(self, default: HubTable) -> HubTable:
        """The hub's table to load; of another repository nothing is known beforehand."""
        base = default if self.hub_id is None else HubTable(self.hub_id)
        return HubTable(base.path, self.hub_config or base.config, self.revision or base.revision)


class PublishedPool(TextGenPool):
    """A pool that reads the hub unless `data_dir` names a local copy."""

    @classmethod
    def require(cls, needed_by: str, **args: Any) -> None:
        """Looks for the package that reads the hub, where the hub is read."""
        if not cls.is_local(**args):
            require_extra("datasets", extra="data", needed_by=needed_by)

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return whether `data_dir` names a local copy."""
        return args.get("data_dir") is not None


@dataclass(frozen=True)
class Published:
    """A published data set.

    Args:
        pool: the id of the pool that reads it.
        columns: the columns that the pool reads, for messages.
        layouts: the files in which it was published, beside tables with the hub's columns.
    """

    pool: str
    columns: str
    layouts: tuple[Layout, ...] = ()

    @property
    def needed_by(self) -> str:
        """The pool, in messages."""
        return f"the data pool {self.pool!r}"

    def rows(self, split: str, source: Source, default: HubTable | None) -> Iterator[LocatedRow]:
        """The rows of a split, in the order of its files or table.

        Args:
            split: `train`, `val` or `test`.
            source: where from.
            default: the hub's table, if the user names none.

        Raises:
            DataPoolError: unknown split, or it cannot be loaded or found, or has no rows.
            MissingExtraError: `datasets` (hub, saved sets) or pyarrow (parquet) is needed and not installed.
        """
        names_of(split)
        if source.data_dir is not None:
            place = str(with_home(source.data_dir))
            rows = self.local_rows(Path(place), split)
        elif default is None and source.hub_id is None:
            raise DataPoolError(f"{self.needed_by}: give `data_dir` or `hub_id`")
        else:
            table = source.table(default or HubTable(str(source.hub_id)))
            place, rows = table.path, table.rows(split, self.needed_by)
        first = next(rows, None)
        if first is None:
            raise DataPoolError(f"{self.needed_by}: the split {split!r} in {place!r} is empty")
        return chain([first], rows)

    def local_rows(self, folder: Path, split: str) -> Iterator[LocatedRow]:
        """The rows of a split in a local folder.

        Raises:
            DataPoolError: the folder is not there, or holds none of the files that the pool can read.
        """
        if not folder.is_dir():
            raise DataPoolError(f"{self.needed_by}: data_dir {str(folder)!r} is not a folder")
        for layout in self.layouts:
            rows = layout.find(folder, split)
            if rows is not None:
                return rows
        rows = self._saved_rows(folder, split)
        if rows is None:
            rows = file_rows(folder, split)
        if rows is None:
            raise DataPoolError(self._nothing_there(folder, split))
        return rows

    def _saved_rows(self, folder: Path, split: str) -> Iterator[LocatedRow] | None:
        tables = saved_tables(folder, self.needed_by)
        return None if tables is None else table_rows_of(split, tables, str(folder))

    def _nothing_there(self, folder: Path, split: str) -> str:
        names = " or ".join(names_of(split))
        expected = [layout.files for layout in self.layouts] + [
            f"a data set written by `save_to_disk`, or {names} as .{', .'.join(FORMATS)} "
            f"(also below data/ or default/, also in shards) with the columns {self.columns}"
        ]
        lines = "".join(f"\n  - {files}" for files in expected)
        return f"{self.needed_by} finds no files for the split {split!r} in {str(folder)!r}. It reads{lines}"


def file_rows(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    """The rows of a split's table files, shard after shard; nothing if there are none."""
    files = table_files(folder, split)
    return (row for file in files for row in table_rows(file)) if files else None


def table_files(folder: Path, split: str) -> list[Path]:
    """The table files of a split, in the order of their names; see the module's docstring for where they may be.

    Raises:
        DataPoolError: a shard is missing.
    """
    for name in names_of(split):
        for ending in FORMATS:
            for place in (folder, folder / "data", folder / "default"):
                for where, stem in ((place, name), (place, rf"{name}-[\w-]+"), (place / name, ".+")):
                    if files := _matching(where, rf"{stem}\.{ending}"):
                        return _complete(files)
    return []


def _complete(shards: list[Path]) -> list[Path]:
    """The files, if the number that their names promise (`train-00000-of-00002`) is there."""
    promised = re.search(r"-of-(\d+)\b", shards[0].name)
    if promised and len(shards) != int(promised[1]):
        raise DataPoolError(f"{shards[0]}: {int(promised[1])} shards belong together, {len(shards)} are there")
    return shards


def first_file(folder: Path, *names: str) -> Path | None:
    """The first of these files that is there, as it is or packed by gzip."""
    candidates = (folder / f"{name}{packed}" for name in names for packed in ("", ".gz"))
    return next((file for file in candidates if file.is_file()), None)


def _matching(folder: Path, pattern: str) -> list[Path]:
    """The files of such names, in upper or lower case; of one that is there as it is and packed, the former."""
    if not folder.is_dir():
        return []
    name = re.compile(rf"({pattern})(\.gz)?", re.IGNORECASE)
    found = ((name.fullmatch(file.name), file) for file in sorted(folder.iterdir(), reverse=True) if file.is_file())
    return sorted({match[1]: file for match, file in found if match}.values())
