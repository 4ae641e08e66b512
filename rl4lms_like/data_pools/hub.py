"""Tables of the hub, and files of the web, through the `datasets` library, which keeps what it fetched.

    HubTable("stanfordnlp/imdb", "plain_text")             the parquet files that the repository has
    HubTable("GEM/common_gen", "default", CONVERTED)       default/<split>/*.parquet of the hub's own conversion

Today's `datasets` runs no loading scripts. Of a repository that still is one, the hub keeps a conversion to parquet in
the revision `refs/convert/parquet`; its files are named one by one, because folders such as `challenge_train_sample`
would be taken for parts of `train`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.core.errors import DataPoolError, import_extra
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import LocatedRow

CONVERTED = "refs/convert/parquet"
"""The revision in which the hub keeps its conversions."""


@dataclass(frozen=True)
class HubTable:
    """A data set of the hub.

    Args:
        path: `owner/name`.
        config: its configuration; of a conversion the folder, `default` where there is only one.
        revision: branch, tag or commit; default: the main branch.
    """

    path: str
    config: str | None = None
    revision: str | None = None

    def rows(self, split: str, needed_by: str) -> Iterator[LocatedRow]:
        """The rows of a split, in the table's order.

        Raises:
            DataPoolError: the data set cannot be loaded, or has no such split.
            MissingExtraError: `datasets` is not installed.
        """
        name, table = table_of(split, self._tables(split, needed_by), self.path)
        return ((f"{self.path}[{name}], row {number}", row) for number, row in enumerate(table))

    def _tables(self, split: str, needed_by: str) -> Mapping[str, Any]:
        datasets = import_extra("datasets", extra="data", needed_by=needed_by)
        try:
            if self.revision != CONVERTED:
                return as_tables(datasets.load_dataset(self.path, self.config, revision=self.revision))
            own = names_of(split)[0]
            files = {own: f"{self.config or 'default'}/{own}/*.parquet"}
            return as_tables(datasets.load_dataset(self.path, data_files=files, revision=self.revision))
        except Exception as error:  # of the network, the hub, the library or its files: all say it themselves
            raise DataPoolError(
                f"{needed_by}: cannot load {self.path!r} from the hub: {type(error).__name__}: {error}. "
                "Without a network give a local copy in `data_dir`"
            ) from error


def saved_tables(folder: Path, needed_by: str) -> Mapping[str, Any] | None:
    """What `save_to_disk` wrote into a folder, by split; nothing if it did not.

    Raises:
        DataPoolError: the folder cannot be read.
        MissingExtraError: `datasets` is not installed.
    """
    if not any((folder / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        return None
    datasets = import_extra("datasets", extra="data", needed_by=needed_by)
    try:
        return as_tables(datasets.load_from_disk(str(folder)))
    except Exception as error:
        raise DataPoolError(f"cannot load the data set {str(folder)!r}: {type(error).__name__}: {error}") from error


def as_tables(loaded: Any) -> Mapping[str, Any]:
    """Split name -> table; an only table is `train`, unless it says otherwise."""
    return dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}


def table_of(split: str, tables: Mapping[str, Any], source: str) -> tuple[str, Any]:
    """The data set's name for a split, and the table.

    Raises:
        DataPoolError: it has no such split.
    """
    for name in names_of(split):
        if name in tables:
            return name, tables[name]
    raise DataPoolError(f"the data set {source!r} has no split for {split!r}; it has {', '.join(tables)}")


def downloaded(url: str, needed_by: str, *, unpack: bool = False) -> Path:
    """A file of the web, fetched once; unpacked it is a folder.

    Raises:
        DataPoolError: it cannot be fetched.
        MissingExtraError: `datasets` is not installed.
    """
    datasets = import_extra("datasets", extra="data", needed_by=needed_by)
    manager = datasets.DownloadManager(dataset_name=url.rsplit("/", 1)[-1])
    try:
        return Path(manager.download_and_extract(url) if unpack else manager.download(url))
    except Exception as error:
        raise DataPoolError(
            f"{needed_by}: cannot fetch {url}: {type(error).__name__}: {error}. "
            "Without a network give a local copy in `data_dir`"
        ) from error
