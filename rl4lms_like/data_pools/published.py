"""Published datasets from the hub or from a local copy, as rows with the columns of the hub's table.

    data_dir set      the dataset's own files (`layouts`), else a folder of `save_to_disk`, else table files per split
    otherwise         the hub's table, by default one that is known to work

    table files       train.jsonl   validation.jsonl   test.jsonl         or .parquet, .json, .csv, .tsv, or gzipped
                      data/train-00000-of-00002.parquet ...               as in hub repositories
                      default/train/0000.parquet ...                      as in the hub's parquet conversions

Files of `val` may be named `validation`, `val`, `valid` or `dev`.

Current versions of `datasets` do not run loading scripts. For repositories that consist of such a script, the hub
keeps a conversion to parquet in the revision `refs/convert/parquet`. The files of a split are downloaded from there and
read directly, for two reasons: `datasets` would treat folders such as `challenge_train_sample` as parts of `train`, and
without a network it cannot reuse what it has loaded from a list of files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import names_of
from rl4lms_like.data_pools.tables import READERS, LocatedRow, parquet_rows, table_rows
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import DataPoolError, import_extra, require_extra
from rl4lms_like.system.numbers import Count
from rl4lms_like.system.wording import help_of

Find: TypeAlias = "Callable[[Path, str], Iterator[LocatedRow] | None]"
"""Function from folder and split to the rows, or None if the folder has no such files."""

CONVERTED = "refs/convert/parquet"  # revision in which the hub keeps its parquet conversions


@dataclass(frozen=True)
class Source:
    """Arguments that all pools of published datasets have in common.

    Args:
        data_dir: folder of a local copy.
        hub_id: another hub repository with the same columns.
        hub_config: configuration of the hub repository.
        revision: branch, tag or commit of the hub repository.
        max_size: maximum number of samples per split.
    """

    data_dir: str | None = None
    hub_id: str | None = None
    hub_config: str | None = None
    revision: str | None = None
    max_size: Count | None = None

    @property
    def is_default(self) -> bool:
        """True if neither a local copy nor a repository is selected."""
        choices = (self.data_dir, self.hub_id, self.hub_config, self.revision)
        return all(choice is None for choice in choices)


@dataclass(frozen=True)
class HubTable:
    """Dataset on the hub.

    HubTable("stanfordnlp/imdb", "plain_text")             as `datasets` loads it
    HubTable("GEM/common_gen", "default", CONVERTED)       default/<split>/*.parquet of the hub's own conversion
    """

    path: str  # `owner/name`
    config: str | None = None  # configuration; for a conversion its folder, `default` if there is only one
    revision: str | None = None  # branch, tag or commit; default: the main branch

    def rows(self, split: str, needed_by: str) -> Iterator[LocatedRow]:
        """Return the rows of a split, in the table's order; errors as in `PublishedPool.rows`."""
        datasets = import_extra("datasets", extra="data", needed_by=needed_by)
        with fetching(f"{needed_by}: cannot load {self.path!r} from the hub"):
            # Conversions are read as files, not by `datasets` (the module's docstring says why); `val` is `validation`.
            if self.revision == CONVERTED:
                return chain.from_iterable(map(parquet_rows, self._converted_files(names_of(split)[0])))
            tables = as_tables(datasets.load_dataset(self.path, self.config, revision=self.revision))
        return _rows_of(split, tables, self.path)

    def _converted_files(self, name: str) -> list[Path]:
        from huggingface_hub import snapshot_download

        # Shards have numbers of four digits, 0000.parquet: sorted by name they are in the table's order.
        pattern = f"{self.config or 'default'}/{name}/*.parquet"
        folder = snapshot_download(self.path, repo_type="dataset", revision=CONVERTED, allow_patterns=pattern)
        files = sorted(Path(folder).glob(pattern))
        if not files:
            raise FileNotFoundError(f"{pattern} does not exist in the revision {CONVERTED}")
        return files


class PublishedPool(TextGenPool):
    """Pool that reads from the hub unless `data_dir` is set to a local copy.

    Attributes:
        id: id of the pool, for messages.
        hub: hub table to use if the user selects no other; None if the dataset is not on the hub.
        layouts: readers of the files in which the dataset was published, besides tables with the hub's columns.
            The help of `data_dir` in `prepare` describes all of them, also for messages.
    """

    id: ClassVar[str]
    hub: ClassVar[HubTable | None] = None
    layouts: ClassVar[Sequence[Find]] = ()

    @classmethod
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that the package `datasets` is installed if the pool reads from the hub."""
        if not cls.is_local(**args):
            require_extra("datasets", extra="data", needed_by=needed_by)

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return True if `data_dir` is set."""
        return args.get("data_dir") is not None

    @classmethod
    def needed_by(cls) -> str:
        """Return the description of the pool for messages."""
        return f"the data pool {cls.id!r}"

    @classmethod
    def rows(
        cls, split: str, source: Source, hub: HubTable | None = None, layouts: Sequence[Find] = ()
    ) -> Iterator[LocatedRow]:
        """Return the rows of a split, in the order of its files or table; `hub` and `layouts` default to the pool's.

        Raises:
            DataPoolError: unknown split, or it cannot be loaded or found, or has no rows.
            MissingExtraError: `datasets` (hub, saved datasets) or pyarrow (parquet) is needed and not installed.
        """
        names_of(split)

        # A local copy takes precedence. A repository of the user's has none of the settings of the pool's own table.
        table = HubTable(source.hub_id) if source.hub_id is not None else hub or cls.hub
        if source.data_dir is not None:
            location = str(with_home(source.data_dir))
            rows = cls._local_rows(Path(location), split, layouts or cls.layouts)
        elif table is None:
            raise DataPoolError(f"{cls.needed_by()}: set `data_dir` or `hub_id`")
        else:
            location = table.path
            table = HubTable(location, source.hub_config or table.config, source.revision or table.revision)
            rows = table.rows(split, cls.needed_by())

        # Rows are read one by one: the first one shows whether there are any.
        first = next(rows, None)
        if first is None:
            raise DataPoolError(f"{cls.needed_by()}: the split {split!r} in {location!r} is empty")
        return chain([first], rows)

    @classmethod
    def _local_rows(cls, folder: Path, split: str, layouts: Sequence[Find]) -> Iterator[LocatedRow]:
        if not folder.is_dir():
            raise DataPoolError(f"{cls.needed_by()}: data_dir {str(folder)!r} is not a folder")

        # The dataset's own files come first: some are JSON Lines too, but with other columns than the hub's table.
        for find in layouts:
            if (rows := find(folder, split)) is not None:
                return rows
        if (tables := saved_tables(folder, cls.needed_by())) is not None:
            return _rows_of(split, tables, str(folder))
        if files := _table_files(folder, split):
            return chain.from_iterable(map(table_rows, files))

        # The help of `data_dir` lists what is supported, so that the message cannot differ from the documentation.
        raise DataPoolError(
            f"{cls.needed_by()} finds no files for the split {split!r} in {str(folder)!r}. Supported is "
            f"{help_of(cls.prepare)['data_dir']} Tables are a dataset written by `save_to_disk`, or "
            f"{' or '.join(names_of(split))} as .{', .'.join(READERS)} (also below data/ or default/, also in shards)."
        )


def saved_tables(folder: Path, needed_by: str) -> Mapping[str, Any] | None:
    """Load a folder written by `save_to_disk`: split name -> table, or None for another folder."""
    if not any((folder / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        return None
    datasets = import_extra("datasets", extra="data", needed_by=needed_by)
    with fetching(f"cannot load the dataset {str(folder)!r}", hint=""):
        return as_tables(datasets.load_from_disk(str(folder)))


def as_tables(loaded: Any) -> Mapping[str, Any]:
    """Return split name -> table; a single table gets the name of its split, by default `train`."""
    return dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}


def _rows_of(split: str, tables: Mapping[str, Any], source: str) -> Iterator[LocatedRow]:
    """Return the rows of a split from tables of `datasets`, in stored form: features are not decoded."""
    name = next((name for name in names_of(split) if name in tables), None)
    if name is None:
        raise DataPoolError(f"the dataset {source!r} has no split for {split!r}; it has {', '.join(tables)}")

    # Batches of Arrow rows: three times as fast as iterating over the table.
    batches = tables[name].with_format("arrow").iter(batch_size=1024)
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    return ((f"{source}[{name}], row {number}", row) for number, row in enumerate(rows))


def downloaded(url: str, needed_by: str, *, unpack: bool = False) -> Path:
    """Download a file once and return its path; with `unpack`, extract it and return the folder."""
    datasets = import_extra("datasets", extra="data", needed_by=needed_by)
    settings = datasets.DownloadConfig(use_etag=False)  # an etag needs a server's reply each time
    manager = datasets.DownloadManager(dataset_name=url.rsplit("/", 1)[-1], download_config=settings)
    with fetching(f"{needed_by}: cannot download {url}"):
        return Path(manager.download_and_extract(url) if unpack else manager.download(url))


@contextmanager
def fetching(what: str, hint: str = ". Without a network, set `data_dir` to a local copy") -> Iterator[None]:
    """Raise errors of network, hub, library or files as a `DataPoolError` with their message and a hint."""
    try:
        yield
    except Exception as error:
        raise DataPoolError(f"{what}: {type(error).__name__}: {str(error).rstrip('.')}{hint}") from error


def _table_files(folder: Path, split: str) -> list[Path]:
    """Return the table files of a split, sorted by name; the module docstring lists the supported locations."""
    # By precedence: the name of the split, the format, the folder, then train.jsonl, train-*.jsonl, train/*.jsonl.
    for name, ending, parent in product(names_of(split), READERS, (folder, folder / "data", folder / "default")):
        for directory, stem in ((parent, name), (parent, rf"{name}-[\w-]+"), (parent / name, ".+")):
            files = _matching(directory, rf"{stem}\.{ending}")
            if not files:
                continue

            # An incomplete download would otherwise be a smaller dataset: train-00000-of-00002.parquet alone.
            shards = re.search(r"-of-(\d+)\b", files[0].name)
            if shards and len(files) != int(shards[1]):
                raise DataPoolError(f"{files[0]}: expected {int(shards[1])} shards, found {len(files)}")
            return files
    return []


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, ignoring case; a plain file takes precedence over its gzipped copy."""
    if not folder.is_dir():
        return []
    name = re.compile(rf"({pattern})(\.gz)?", re.IGNORECASE)

    # In reverse order the gzipped copy comes first, and the plain file replaces it.
    by_name: dict[str, Path] = {}
    for file in sorted(folder.iterdir(), reverse=True):
        match = name.fullmatch(file.name)
        if match and file.is_file():
            by_name[match[1]] = file
    return sorted(by_name.values())


def files_of(read: Callable[..., Iterator[LocatedRow]], *names: str) -> Find:
    """Return a layout of files per split, plain or gzip-compressed, all of which must exist; `read` gives the rows.

    files_of(paired_lines, "{0}.src.txt", "{0}.tgt.txt")         train.src.txt and train.tgt.txt
    """

    def find(folder: Path, split: str) -> Iterator[LocatedRow] | None:
        for split_name in names_of(split):
            files: list[Path] = []
            for name in names:
                file = folder / name.format(split_name)
                files.append(file if file.is_file() else file.with_name(f"{file.name}.gz"))
            if all(file.is_file() for file in files):
                return read(*files)
        return None

    return find
