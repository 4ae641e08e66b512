"""Datasets from the Hugging Face hub and files from the web, downloaded once and then read from the cache.

    HubTable("stanfordnlp/imdb", "plain_text")             as `datasets` loads it
    HubTable("GEM/common_gen", "default", CONVERTED)       default/<split>/*.parquet of the hub's own conversion

Current versions of `datasets` do not run loading scripts. For repositories that consist of such a script, the hub
keeps a conversion to parquet in the revision `refs/convert/parquet`. The files of a split are downloaded from there and
read directly, for two reasons: `datasets` would treat folders such as `challenge_train_sample` as parts of `train`, and
without a network it cannot reuse what it has loaded from a list of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rl4lms_like.core.errors import DataPoolError, import_extra
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import LocatedRow, parquet_rows

CONVERTED = "refs/convert/parquet"
"""Revision in which the hub keeps its parquet conversions."""


@dataclass(frozen=True)
class HubTable:
    """Dataset on the hub.

    Args:
        path: `owner/name`.
        config: configuration of the dataset; for a conversion its folder, `default` if there is only one.
        revision: branch, tag or commit; default: the main branch.
    """

    path: str
    config: str | None = None
    revision: str | None = None

    def rows(self, split: str, needed_by: str) -> Iterator[LocatedRow]:
        """Return the rows of a split, in the table's order.

        Raises:
            DataPoolError: the dataset cannot be loaded, or has no such split.
            MissingExtraError: `datasets` is not installed.
        """
        datasets = import_extra("datasets", extra="data", needed_by=needed_by)
        try:
            if self.revision == CONVERTED:
                return chain.from_iterable(map(parquet_rows, self._converted_files(names_of(split)[0])))
            tables = as_tables(datasets.load_dataset(self.path, self.config, revision=self.revision))
        except Exception as error:  # errors of network, hub, library or files; their messages are kept
            raise _not_fetched(f"{needed_by}: cannot load {self.path!r} from the hub", error) from error
        return table_rows_of(split, tables, self.path)

    def _converted_files(self, name: str) -> list[Path]:
        from huggingface_hub import snapshot_download

        pattern = f"{self.config or 'default'}/{name}/*.parquet"
        folder = snapshot_download(self.path, repo_type="dataset", revision=CONVERTED, allow_patterns=pattern)
        if files := sorted(Path(folder).glob(pattern)):
            return files
        raise FileNotFoundError(f"{pattern} does not exist in the revision {CONVERTED}")


def _not_fetched(what: str, error: Exception) -> DataPoolError:
    said = str(error).rstrip(".")
    return DataPoolError(f"{what}: {type(error).__name__}: {said}. Without a network, set `data_dir` to a local copy")


def saved_tables(folder: Path, needed_by: str) -> Mapping[str, Any] | None:
    """Load a folder written by `save_to_disk`: split name -> table, or None for another folder.

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
        raise DataPoolError(f"cannot load the dataset {str(folder)!r}: {type(error).__name__}: {error}") from error


def as_tables(loaded: Any) -> Mapping[str, Any]:
    """Return split name -> table; a single table gets the name of its split, by default `train`."""
    return dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}


def table_rows_of(split: str, tables: Mapping[str, Any], source: str) -> Iterator[LocatedRow]:
    """Return the rows of a split from tables of `datasets`, in stored form: features are not decoded.

    Raises:
        DataPoolError: there is no such split.
    """
    name = next((name for name in names_of(split) if name in tables), None)
    if name is None:
        raise DataPoolError(f"the dataset {source!r} has no split for {split!r}; it has {', '.join(tables)}")
    batches = tables[name].with_format("arrow").iter(batch_size=1024)
    rows = (row for batch in batches for row in batch.to_pylist())  # three times as fast as iterating over the table
    return ((f"{source}[{name}], row {number}", row) for number, row in enumerate(rows))


def downloaded(url: str, needed_by: str, *, unpack: bool = False) -> Path:
    """Download a file once and return its path; with `unpack`, extract it and return the folder.

    Raises:
        DataPoolError: the file cannot be downloaded.
        MissingExtraError: `datasets` is not installed.
    """
    datasets = import_extra("datasets", extra="data", needed_by=needed_by)
    settings = datasets.DownloadConfig(use_etag=False)  # an etag needs a server's reply each time
    manager = datasets.DownloadManager(dataset_name=url.rsplit("/", 1)[-1], download_config=settings)
    try:
        return Path(manager.download_and_extract(url) if unpack else manager.download(url))
    except Exception as error:
        raise _not_fetched(f"{needed_by}: cannot download {url}", error) from error
