"""Pool of the columns of a dataset of the `datasets` library: on the hub, saved to disk, or in local files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.files import Columns
from rl4lms_like.data_pools.formats import RowFormat
from rl4lms_like.data_pools.published import as_tables, fetching, saved_tables
from rl4lms_like.data_pools.splits import SPLITS, Splitting, names_of
from rl4lms_like.data_pools.tables import LocatedRow, refuse_devices
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import DataPoolError, import_extra, require_extra

_NEEDED_BY = "the data pool 'hf_dataset'"


class HfDatasetPool(TextGenPool):
    """Columns of a dataset of the `datasets` library."""

    @classmethod
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that the package `datasets` is installed."""
        require_extra("datasets", extra="data", needed_by=needed_by)

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return True if `path` is a folder, or a format with local files."""
        path = args["path"]
        files = args.get("data_files") or {}

        # A format is a word such as `json`; its files may be addresses.
        has_addresses = any("://" in file for file in files.values())
        is_format = "/" not in path and bool(files) and not has_addresses
        return is_format or os.path.exists(with_home(path))

    @classmethod
    @flattened
    def prepare(
        cls,
        split: str,
        path: str,
        prompt_column: str | None = None,
        name: str | None = None,
        data_files: dict[str, str] | None = None,
        split_names: dict[str, str] | None = None,
        *,
        columns: Columns,
        row_format: RowFormat,
        splitting: Splitting,
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            path: hub id, folder written by `save_to_disk`, or a format (`json`, `csv`, `parquet`, `text`).
            prompt_column: the column that holds the prompt; `a.b` selects a nested column. Required without a
                `format`.
            name: configuration of the dataset.
            data_files: the dataset's split -> file, if `path` is a format.
            split_names: `train`, `val`, `test` -> the dataset's names for them, if they are unusual.
            split_ratios: fractions of train, val and test if the dataset has only one split.
        """
        rows, source, folder = dataset_rows(
            split, path, name=name, data_files=data_files, split_names=split_names, splitting=splitting
        )
        return columns.pool(
            cls, rows, row_format, prompt_column=prompt_column, split=split, source=source, folder=folder
        )


def _folder_of(path: str, file: str | None) -> Path | None:
    """Return the folder of relative paths in a table: that of its file, or of the dataset; None for one of the hub."""
    if file is not None:
        return with_home(file).parent
    return with_home(path) if os.path.isdir(with_home(path)) else None


def dataset_rows(
    split: str,
    path: str,
    *,
    splitting: Splitting,
    name: str | None = None,
    data_files: Mapping[str, str] | None = None,
    split_names: Mapping[str, str] | None = None,
    divided_split: str | None = None,
) -> tuple[Iterator[tuple[int, LocatedRow]], str, Path | None]:
    """Return the numbered rows of a split of a dataset, its name for messages, and the folder of relative paths.

    Arguments as in `prepare`; the folder is None for a dataset of the hub.
    """
    tables = _load(path, name, data_files)
    table_name, is_whole = _table_of(split, tables, path=path, split_names=split_names, divided_split=divided_split)
    table = tables[table_name]
    source = f"{path}[{table_name}]"

    # Numbers of the rows in the stored table, also after the division: an error names a row that users can look up.
    first_rows = range(len(table))[: splitting.max_rows]
    indices = first_rows[: splitting.max_size] if is_whole else splitting.of_all(len(first_rows), split)
    rows = zip(indices, as_stored(table.select(indices)), strict=True)
    folder = _folder_of(path, (data_files or {}).get(table_name))
    return ((index, (f"{source}, row {index}", row)) for index, row in rows), source, folder


def as_stored(table: Any) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a table; images as the bytes or the path that are stored, not decoded."""
    features = import_extra("datasets", extra="data", needed_by=_NEEDED_BY).features
    decoded = (features.Image, features.Audio, features.Video)
    columns = (table.features or {}).values()  # of a stream, `datasets` may not know them, and decodes nothing then
    if not any(isinstance(leaf, decoded) for feature in columns for leaf in _leaves(feature)):
        return table

    # `datasets` decodes each image when a row is read, also those of columns that nobody asks for, and gives PIL's
    # images, whose files are no longer known. Arrow's rows have what is stored.
    batches = table.with_format("arrow").iter(batch_size=64)
    return (row for batch in batches for row in batch.to_pylist())


def _leaves(feature: Any) -> Iterator[Any]:
    """Yield the features of a column that hold no others."""
    if isinstance(feature, Mapping):
        nested = list(feature.values())
    elif isinstance(feature, list):
        nested = feature
    elif hasattr(feature, "feature"):  # a list
        nested = [feature.feature]
    else:
        yield feature
        return
    for inner in nested:
        yield from _leaves(inner)


def _load(path: str, name: str | None, data_files: Mapping[str, str] | None) -> Mapping[str, Any]:
    """Load the dataset: split name -> table."""
    datasets = import_extra("datasets", extra="data", needed_by=_NEEDED_BY)
    if (saved := saved_tables(with_home(path), _NEEDED_BY)) is not None:
        return saved

    files = {split: os.path.expanduser(file) for split, file in (data_files or {}).items()}
    for file in files.values():
        refuse_devices(Path(file))

    hint = ". Without a network, set `path` to a folder written by `save_to_disk`, or set `data_files`"
    with fetching(f"cannot load the dataset {path!r}", hint):
        return as_tables(datasets.load_dataset(os.path.expanduser(path), name, data_files=files or None))


def _table_of(
    split: str,
    tables: Mapping[str, Any],
    *,
    path: str,
    split_names: Mapping[str, str] | None,
    divided_split: str | None,
) -> tuple[str, bool]:
    """Return the dataset's name for a split and whether it is used whole; a single split is divided among all three."""
    if divided_split is not None:
        if divided_split in tables:
            return divided_split, False
        message = f"the dataset {path!r} has no split {divided_split!r}; it has {', '.join(tables)}. Set divided_split"
        raise DataPoolError(message)
    if len(tables) == 1 and not split_names:
        return next(iter(tables)), False

    # A name that the user gives is the only one: the usual names could select another table than the intended one.
    if split_names and split in split_names:
        names: Sequence[str] = [split_names[split]]
    else:
        names = names_of(split) if split in SPLITS else [split]
    for name in names:
        if name in tables:
            return name, True
    raise DataPoolError(
        f"the dataset {path!r} has no split {' or '.join(map(repr, names))} for {split!r}; it has "
        f"{', '.join(tables)}. Set split_names"
    )
