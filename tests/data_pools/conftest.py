"""A hub without a network: loading, conversions and downloads answer from what the test lays down.

hub.serve(path, train=rows, ...)     what a repository holds: real `Dataset` objects, and in conversions real files
hub.asked                            how the repositories were asked for: arguments, and addresses
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest


class Hub:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[Any] = []
        self.tables: dict[tuple[str, str | None], datasets.DatasetDict] = {}
        self.files: dict[str, Path] = {}

    def serve(self, path: str, config: str | None = None, **splits: list[dict[str, Any]]) -> None:
        tables = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        self.tables[path, config] = datasets.DatasetDict(tables)

    def load_dataset(self, path, name=None, *, revision=None):
        self.asked.append({"path": path, "name": name, "revision": revision})
        configs = [config for known, config in self.tables if known == path]
        if not configs:
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub")
        if name not in configs:
            raise ValueError(f"BuilderConfig {name!r} not found. Available: {configs}")
        return self.tables[path, name]

    def snapshot_download(self, path, *, repo_type, revision, allow_patterns):
        assert repo_type == "dataset" and revision == "refs/convert/parquet"
        self.asked.append({"path": path, "files": allow_patterns})
        if (path, None) not in self.tables:
            raise FileNotFoundError(f"no repository {path}")
        config = allow_patterns.split("/")[0]
        for split, table in self.tables[path, None].items():
            (self.folder / path / config / split).mkdir(parents=True, exist_ok=True)
            table.to_parquet(str(self.folder / path / config / split / "0000.parquet"))
        return str(self.folder / path)

    def download(self, url: str) -> str:
        self.asked.append(url)
        if url not in self.files:
            raise FileNotFoundError(f"Couldn't reach {url}")
        return str(self.files[url])


@pytest.fixture
def hub(monkeypatch, tmp_path_factory) -> Hub:
    hub = Hub(tmp_path_factory.mktemp("hub"))

    class Downloads:
        def __init__(self, dataset_name, download_config):
            assert download_config.use_etag is False
            self.download = self.download_and_extract = hub.download

    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    monkeypatch.setattr(datasets, "DownloadManager", Downloads)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.fixture
def lay(tmp_path):
    """Writes files, by name, and returns their folder."""

    def write(files: dict[str, str | bytes], folder: str = "copy") -> str:
        for name, content in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(tmp_path / folder)

    return write


@pytest.fixture
def no_datasets(monkeypatch):
    """`datasets` and pyarrow as good as not installed."""
    import sys

    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
