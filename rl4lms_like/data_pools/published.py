"""Published datasets from the hub or from a local copy, as rows with the columns of the hub's table.

    data_dir set      the dataset's own files (`layouts`), else a folder of `save_to_disk`, else table files per split
    otherwise         the hub's table, by default one that is known to work

    table files       train.jsonl   validation.jsonl   test.jsonl         or .parquet, .json, .csv, .tsv, or gzipped
                      data/train-00000-of-00002.parquet ...               as in hub repositories
                      default/train/0000.parquet ...                      as in the hub's parquet conversions

Files of `val` may be named `validation`, `val`, `valid` or `dev`.
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
"""Function from folder and split to the rows, or None if the folder has no such files."""


@dataclass(frozen=True)
class Layout:
    """Files in which a dataset was published.

    Args:
        files: the file names, for the error message if none is found.
        find: function that reads the files.
    """

    files: str
    find: Find


@dataclass(frozen=True)
class Source:
    """Source of a dataset: the arguments that all pools of published datasets have in common.

    Args:
        data_dir: folder of a local copy.
        hub_id: another hub repository with the same columns.
        hub_config: configuration of the hub repository.
        revision: branch, tag or commit of the hub repository.
    """

    data_dir: str | None = None
    hub_id: str | None = None
    hub_config: str | None = None
    revision: str | None = None

    def table(self, default: HubTable) -> HubTable:
        """Return the hub table to load; for another repository, config and revision of `default` are not used."""
        base = default if self.hub_id is None else HubTable(self.hub_id)
        return HubTable(base.path, self.hub_config or base.config, self.revision or base.revision)


class PublishedPool(TextGenPool):
    """Pool that reads from the hub unless `data_dir` is set to a local copy."""

    @classmethod
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that the package `datasets` is installed if the pool reads from the hub."""
        if not cls.is_local(**args):
            require_extra("datasets", extra="data", needed_by=needed_by)

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return True if `data_dir` is set."""
        return args.get("data_dir") is not None


@dataclass(frozen=True)
class Published:
    """Published dataset.

    Args:
        pool: id of the pool that reads the dataset.
        columns: columns that the pool reads, for messages.
        layouts: file layouts in which it was published, besides tables with the hub's columns.
    """

    pool: str
    columns: str
    layouts: tuple[Layout, ...] = ()

    @property
    def needed_by(self) -> str:
        """Description of the pool for messages."""
        return f"the data pool {self.pool!r}"

    def rows(self, split: str, source: Source, default: HubTable | None) -> Iterator[LocatedRow]:
        """Return the rows of a split, in the order of its files or table.

        Args:
            split: `train`, `val` or `test`.
            source: source of the dataset.
            default: hub table to use if the user selects no other.

        Raises:
            DataPoolError: unknown split, or it cannot be loaded or found, or has no rows.
            MissingExtraError: `datasets` (hub, saved datasets) or pyarrow (parquet) is needed and not installed.
        """
        names_of(split)
        if source.data_dir is not None:
            place = str(with_home(source.data_dir))
            rows = self.local_rows(Path(place), split)
        elif default is None and source.hub_id is None:
            raise DataPoolError(f"{self.needed_by}: set `data_dir` or `hub_id`")
        else:
            table = source.table(default or HubTable(str(source.hub_id)))
            place, rows = table.path, table.rows(split, self.needed_by)
        first = next(rows, None)
        if first is None:
            raise DataPoolError(f"{self.needed_by}: the split {split!r} in {place!r} is empty")
        return chain([first], rows)

    def local_rows(self, folder: Path, split: str) -> Iterator[LocatedRow]:
        """Return the rows of a split in a local folder.

        Raises:
            DataPoolError: the folder does not exist, or contains none of the supported files.
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
            f"a dataset written by `save_to_disk`, or {names} as .{', .'.join(FORMATS)} "
            f"(also below data/ or default/, also in shards) with the columns {self.columns}"
        ]
        lines = "".join(f"\n  - {files}" for files in expected)
        return f"{self.needed_by} finds no files for the split {split!r} in {str(folder)!r}. Supported files:{lines}"


def file_rows(folder: Path, split: str) -> Iterator[LocatedRow] | None:
    """Return the rows of a split's table files, shard by shard, or None if there are no files."""
    files = table_files(folder, split)
    return (row for file in files for row in table_rows(file)) if files else None


def table_files(folder: Path, split: str) -> list[Path]:
    """Return the table files of a split, sorted by name; the module docstring lists the supported locations.

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
    """Return the files after checking that all shards (`train-00000-of-00002`) are present."""
    promised = re.search(r"-of-(\d+)\b", shards[0].name)
    if promised and len(shards) != int(promised[1]):
        raise DataPoolError(f"{shards[0]}: expected {int(promised[1])} shards, found {len(shards)}")
    return shards


def first_file(folder: Path, *names: str) -> Path | None:
    """Return the first of these files that exists, plain or gzip-compressed."""
    candidates = (folder / f"{name}{packed}" for name in names for packed in ("", ".gz"))
    return next((file for file in candidates if file.is_file()), None)


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, ignoring case; a plain file takes precedence over its gzipped copy."""
    if not folder.is_dir():
        return []
    name = re.compile(rf"({pattern})(\.gz)?", re.IGNORECASE)
    found = ((name.fullmatch(file.name), file) for file in sorted(folder.iterdir(), reverse=True) if file.is_file())
    return sorted({match[1]: file for match, file in found if match}.values())
