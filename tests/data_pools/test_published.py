"""Where a published data set is found: its own files, saved sets, table files as the hub lays them out, the hub."""

from __future__ import annotations

import functools
import gzip
import json
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest

from rl4lms_like import DATA_POOLS
from rl4lms_like.data_pools.published import CONVERTED, HubTable, PublishedPool, Source, downloaded
from rl4lms_like.system.errors import DataPoolError, MissingExtraError


class MyPool(PublishedPool):
    id = "my_pool"
    layouts = (lambda folder, split: None,)

    @classmethod
    def prepare(cls, split, data_dir=None):
        """Build the pool.

        Args:
            data_dir: a local copy: `<split>.words`.
        """


PUBLISHED = {
    "imdb": {},
    "imdb_seq2seq": {},
    "commongen": {},
    "totto": {},
    "cnn_daily_mail": {},
    "narrative_qa": {},
    "wmt16": {"source_language": "en", "target_language": "de"},
    "wmt14_processed_en_de": {},
    "wmt16newsonly": {},
    "iwslt2017en_de": {},
    "crd3": {"max_context_size": 2},
    "daily_dialog": {"context_size": 1},
}
"""The pools of RL4LMs that read a published data set, with the arguments that they need."""


def texts(split, source=None, default=None):
    return [row["text"] for _, row in MyPool.rows(split, source or Source(), default)]


def lines(*words):
    return "".join(json.dumps({"text": word}) + "\n" for word in words)


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "validation.jsonl", "test.jsonl"],
        ["train.json", "dev.json", "test.json"],
        ["data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001-0a1b2c.jsonl", "data/test-0.jsonl"],
        ["default/train/0000.jsonl", "default/validation/0000.jsonl", "default/test/0000.jsonl"],
        ["train/a.jsonl", "valid/a.jsonl", "test/a.jsonl"],
    ],
)
def test_table_files_are_found_where_the_hub_has_them(lay, names):
    others = {"training_notes.jsonl": "x", "default/challenge_train_sample/0000.jsonl": lines("scrambled")}
    folder = lay({name: lines(split) for name, split in zip(names, ("train", "val", "test"), strict=True)} | others)
    assert [texts(split, Source(folder)) for split in ("train", "val", "test")] == [["train"], ["val"], ["test"]]


def test_shards_are_read_in_order(lay):
    folder = lay({f"train-0000{n}-of-00003.jsonl": lines(f"{n}a", f"{n}b") for n in (2, 0, 1)})
    assert texts("train", Source(folder)) == ["0a", "0b", "1a", "1b", "2a", "2b"]


def test_a_file_that_is_there_twice_is_read_once(lay):
    packed = gzip.compress(lines("packed").encode())
    both = {"train.jsonl": lines("plain"), "train.jsonl.gz": packed, "train-part.jsonl": lines("more")}
    assert texts("train", Source(lay(both))) == ["plain"]
    assert texts("train", Source(lay({"train-0.jsonl.gz": packed, "train-1.JSONL": lines("b")}, "shards"))) == [
        "packed",
        "b",
    ]


def test_a_missing_shard_is_named(lay):
    folder = lay({"data/train-00000-of-00002.jsonl": lines("a")})
    with pytest.raises(DataPoolError, match=r"train-00000-of-00002.jsonl.* 2 .* 1$"):
        texts("train", Source(folder))


def test_an_empty_file_is_named_by_its_folder(lay):
    with pytest.raises(DataPoolError, match=r"'my_pool': .*'train' .*copy'"):
        texts("train", Source(lay({"train.jsonl": "\n"})))


def test_a_home_folder_is_found(lay, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(lay({"train.jsonl": lines("a")})).parent))
    assert texts("train", Source("~/copy")) == ["a"]


def test_rows_of_the_hub_are_those_that_datasets_gives(hub):
    rows = [
        {"text": f"{n}", "pair": {"en": "a", "de": "b"}, "turns": [{"names": ["x"]}] * (n % 3)} for n in range(2100)
    ]
    hub.serve("owner/set", train=rows)
    found = list(HubTable("owner/set").rows("train", "a test"))
    assert [row for _, row in found] == rows and found[2000][0] == "owner/set[train], row 2000"


def test_what_was_fetched_once_needs_no_server_again(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", tmp_path / "cache/extracted")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    (tmp_path / "files").mkdir()
    with zipfile.ZipFile(tmp_path / "files/set.zip", "w") as archive:
        archive.writestr("../outside.txt", "no")
        archive.writestr("set/a.txt", "yes")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "files"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/set.zip"
        folder = downloaded(url, "a test", unpack=True)
        server.shutdown()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert downloaded(url, "a test", unpack=True) == folder
    assert (folder / "set/a.txt").read_text() == "yes"
    assert not list(tmp_path.rglob("outside.txt"))  # an archive writes nowhere but into its folder


def test_a_saved_set_is_read(tmp_path):
    tables = {split: datasets.Dataset.from_list([{"text": split}]) for split in ("train", "validation")}
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "set"))
    assert texts("val", Source(str(tmp_path / "set"))) == ["validation"]
    with pytest.raises(DataPoolError, match=r"'test'.* train, validation"):
        texts("test", Source(str(tmp_path / "set")))


def test_own_files_come_before_tables(lay):
    folder = lay({"train.jsonl": lines("table")})
    own = [lambda folder, split: iter([("here", {"text": "own"})])]
    assert [row["text"] for _, row in MyPool.rows("train", Source(folder), layouts=own)] == ["own"]


def test_an_empty_folder_is_told_what_is_read(tmp_path):
    with pytest.raises(DataPoolError) as raised:
        texts("val", Source(str(tmp_path)))
    message = str(raised.value)
    assert message.startswith(f"the data pool 'my_pool' finds no files for the split 'val' in '{tmp_path}'.")
    assert "a local copy: `<split>.words`." in message
    assert "validation or val or valid or dev as .parquet, .jsonl, .json, .csv, .tsv" in message


def test_what_is_no_folder_and_what_is_no_split_is_named(tmp_path):
    with pytest.raises(DataPoolError):
        texts("train", Source(str(tmp_path / "nowhere")))
    with pytest.raises(DataPoolError, match=r"'dev'.* train, val, test"):
        texts("dev", Source(str(tmp_path)))


def test_a_conversion_is_asked_for_one_split_s_files_by_name(hub):
    hub.serve("owner/set", train=[{"text": "a"}], validation=[{"text": "b"}], challenge_train_sample=[{"text": "c"}])
    assert texts("val", default=HubTable("owner/set", "part", CONVERTED)) == ["b"]
    assert hub.asked == [{"path": "owner/set", "files": "part/validation/*.parquet"}]
    with pytest.raises(DataPoolError, match=r"part/test/\*.parquet"):
        texts("test", default=HubTable("owner/set", "part", CONVERTED))


def test_a_user_s_repository_takes_the_place_of_the_default_one(hub):
    hub.serve("me/mine", "small", train=[{"text": "mine"}])
    source = Source(hub_id="me/mine", hub_config="small", revision="v2")
    assert texts("train", source, HubTable("owner/set", "part", CONVERTED)) == ["mine"]
    assert hub.asked == [{"path": "me/mine", "name": "small", "revision": "v2"}]


def test_what_the_hub_says_is_passed_on_with_the_way_out(hub):
    with pytest.raises(DataPoolError, match=r"'my_pool': .*'gone/set'"):
        texts("train", default=HubTable("gone/set"))


@pytest.mark.parametrize("id", PUBLISHED)
def test_every_pool_says_which_extra_the_hub_needs(id, no_datasets):
    with pytest.raises(MissingExtraError) as caught:
        DATA_POOLS.get(id, {"split": "train", **PUBLISHED[id]})
    assert caught.value.extra == "data"


@pytest.mark.parametrize("id", PUBLISHED)
def test_every_pool_lists_its_files_to_whom_has_none(id, tmp_path):
    with pytest.raises(DataPoolError, match=rf"'{id}' .*'(train|val)'.* a local copy"):
        DATA_POOLS.get(id, {"split": "val", "data_dir": str(tmp_path), **PUBLISHED[id]})


@pytest.mark.parametrize("id", PUBLISHED)
def test_every_pool_says_what_it_needs_and_knows_the_splits(id, tmp_path):
    assert "extra 'data'" in DATA_POOLS.entry(id).needs
    with pytest.raises(DataPoolError, match=r"'validation'.* train, val, test"):
        DATA_POOLS.get(id, {"split": "validation", "data_dir": str(tmp_path), **PUBLISHED[id]})
