"""Columns of `datasets` data sets, without a hub: saved ones and local files."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.hf_dataset import HfDatasetPool
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

datasets = pytest.importorskip("datasets")

ARGS = {"prompt_column": "translation.en", "reference_column": "translation.de", "meta_columns": ["id"]}


def rows(n, name="row"):
    return [{"id": index, "translation": {"en": f"{name} {index}", "de": f"Zeile {index}"}} for index in range(n)]


@pytest.fixture
def saved(tmp_path):
    def save(**splits):
        tables = {split: datasets.Dataset.from_list(table) for split, table in splits.items()}
        datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "set"))
        return str(tmp_path / "set")

    return save


def test_a_device_is_no_data_file():
    with pytest.raises(DataPoolError, match="/dev/zero"):
        HfDatasetPool.prepare("train", "json", data_files={"train": "/dev/zero"}, prompt_column="q")


def test_usual_split_names_are_found(saved):
    path = saved(train=rows(5), validation=rows(3, "held out"), test=rows(2))
    assert HfDatasetPool.prepare("val", path, **ARGS).samples[1] == Sample(
        "val_1", "held out 1", ["Zeile 1"], {"id": 1}
    )
    assert [len(HfDatasetPool.prepare(split, path, **ARGS)) for split in ("train", "val", "test")] == [5, 3, 2]
    assert len(HfDatasetPool.prepare("train", path, max_size=2, **ARGS)) == 2


def test_unusual_split_names_are_mapped(saved):
    path = saved(learn=rows(5), check=rows(3))
    names = {"train": "learn", "val": "check", "test": "check"}
    assert len(HfDatasetPool.prepare("test", path, split_names=names, **ARGS)) == 3
    with pytest.raises(DataPoolError, match=r"'train'.* learn, check"):
        HfDatasetPool.prepare("train", path, **ARGS)


def test_messages_become_samples(saved):
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    path = saved(train=[{"turns": turns}], validation=[{"turns": turns}], test=[{"turns": turns}])
    (sample,) = HfDatasetPool.prepare("val", path, prompt_column="turns", last_message_as_reference=True).samples
    assert sample == Sample("val_0", "Why?", ["So."], None, turns[:1], learned="conversation")


def test_an_only_split_is_shared_out(saved):
    path = saved(train=rows(20))
    pools = [HfDatasetPool.prepare(split, path, **ARGS).samples for split in ("train", "val", "test")]
    assert [len(pool) for pool in pools] == [16, 2, 2]
    assert len({sample.prompt_or_input_text for pool in pools for sample in pool}) == 20
    check_data_pool(HfDatasetPool, path=path, **ARGS)


def test_local_files_of_a_format(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    files = {}
    for split, n in (("train", 4), ("test", 2)):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows(n)))
        files[split] = str(tmp_path / f"{split}.jsonl")
    assert len(HfDatasetPool.prepare("train", "json", data_files=files, **ARGS)) == 4


def test_what_is_wrong_is_named(saved, tmp_path):
    path = saved(train=rows(5), test=rows(1))
    with pytest.raises(DataPoolError, match=r"set\[train\], row 0: .*'translation.fr'"):
        HfDatasetPool.prepare("train", path, prompt_column="translation.fr")
    with pytest.raises(DataPoolError):
        HfDatasetPool.prepare("train", str(tmp_path / "nowhere"), **ARGS)
