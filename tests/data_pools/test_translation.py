"""Translation pairs: from the hub by ids that work, from parallel texts and from tables."""

from __future__ import annotations

import gzip
import json

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.translation import WMT, IWSLT2017EnDe, WMT14PreprocessedEnDe, WMT16NewsOnlyDatasetEnDe
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

PAIR = {"source_language": "en", "target_language": "de"}


def pairs(*words):
    return [{"translation": {"en": word, "de": word.upper()}} for word in words]


def prompts(pool, split, **args):
    return [sample.prompt_or_input_text for sample in pool.prepare(split, **args).samples]


def test_the_hub_s_pairs_with_what_stands_around_them(hub):
    hub.serve("IWSLT/iwslt2017", train=pairs("a", "b"), validation=pairs("c"), test=pairs("d"))
    args = {"prompt_prefix": "translate English to German: ", "prompt_suffix": " ="}
    assert IWSLT2017EnDe.prepare("train", **args).samples[1] == Sample(
        "train_1", "translate English to German: b =", ["B"]
    )
    assert hub.asked[0] == {"path": "IWSLT/iwslt2017", "files": "iwslt2017-de-en/train/*.parquet"}
    check_data_pool(IWSLT2017EnDe, **args)


def test_wmt_14_comes_from_the_hub_s_conversion(hub):
    hub.serve("stas/wmt14-en-de-pre-processed", train=pairs("a"), validation=pairs("c"), test=pairs("d"))
    assert prompts(WMT14PreprocessedEnDe, "val") == ["c"]
    assert hub.asked[0]["files"] == "ende/validation/*.parquet"


def test_news_train_on_one_set_and_are_tested_with_another(hub):
    hub.serve("Helsinki-NLP/news_commentary", "de-en", train=pairs("comment"))
    hub.serve("wmt/wmt16", "de-en", train=pairs("parliament"), validation=pairs("news"), test=pairs("new news"))
    found = [prompts(WMT16NewsOnlyDatasetEnDe, split) for split in ("train", "val", "test")]
    assert found == [["comment"], ["news"], ["new news"]]


def test_either_order_of_languages_names_the_configuration(hub):
    hub.serve("wmt/wmt16", "de-en", train=pairs("a"), validation=pairs("b"))
    assert prompts(WMT, "val", wmt_id="wmt16", **PAIR) == ["b"]
    assert [call["name"] for call in hub.asked] == ["en-de", "de-en"]
    assert WMT.prepare("val", "de", "en").samples == [Sample("val_0", "B", ["b"])]
    with pytest.raises(DataPoolError, match=r"'wmt/wmt16'.*'fr-en' .*\['de-en'\]"):
        WMT.prepare("val", "en", "fr")


def test_a_set_that_is_not_there_is_not_asked_for_twice(hub):
    with pytest.raises(DataPoolError):
        WMT.prepare("train", "en", "de", wmt_id="me/pairs")
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("train.{}", "val.{}", "test.{}"),
        ("train.{}.gz", "val.{}.gz", "test_2016_flickr.{}.gz"),
        ("train.en-de.{}", "valid.de-en.{}", "test.{}"),
        ("train.{}", "dev.{}", "test.{}"),
    ],
)
def test_parallel_texts_are_found_by_their_usual_names(lay, names, no_datasets):
    files = {}
    for name, word in zip(names, ("train", "val", "test"), strict=True):
        for language, text in (("en", word), ("de", word.upper())):
            lines = f"{text} 1\n{text} 2\n".encode()
            files[name.format(language)] = gzip.compress(lines) if name.endswith(".gz") else lines
    folder = lay(files)
    assert prompts(WMT, "val", data_dir=folder, **PAIR) == ["val 1", "val 2"]
    assert WMT.prepare("test", "de", "en", data_dir=folder).samples[1] == Sample("test_1", "TEST 2", ["test 2"])
    check_data_pool(WMT, data_dir=folder, max_size=1, **PAIR)


@pytest.mark.parametrize("pool", [WMT14PreprocessedEnDe, WMT16NewsOnlyDatasetEnDe, IWSLT2017EnDe])
def test_source_and_target_files_are_read(lay, pool):
    files = {f"{name}.{side}": f"{name} {side}\n" for name in ("train", "val", "test") for side in ("source", "target")}
    folder = lay(files)
    assert pool.prepare("val", data_dir=folder).samples == [Sample("val_0", "val source", ["val target"])]
    check_data_pool(pool, data_dir=folder)


@pytest.mark.parametrize(
    "files",
    [
        {"train.jsonl": json.dumps({"translation": {"en": "A.", "de": "B."}})},
        {"train.csv": "de,en\nB.,A.\n"},
        {"data/train-00000-of-00001.json": json.dumps([{"en": "A.", "de": "B."}])},
    ],
)
def test_tables_with_one_column_for_both_or_one_each_are_read(lay, files):
    assert WMT.prepare("train", "en", "de", data_dir=lay(files)).samples == [Sample("train_0", "A.", ["B."])]


def test_what_is_wrong_is_named(lay):
    folder = lay({"train.en": "A.\nB.\n", "train.de": "A.\n", "val.jsonl": '{"translation": {"en": "A."}}'})
    with pytest.raises(DataPoolError, match=r"train.de .* 1 .*train.en"):
        WMT.prepare("train", "en", "de", data_dir=folder)
    with pytest.raises(DataPoolError, match=r"val.jsonl, line 1: .*'translation.de'"):
        WMT.prepare("val", "en", "de", data_dir=folder)
    with pytest.raises(DataPoolError, match=r"train.en`, `train.de"):
        WMT.prepare("test", "fr", "en", data_dir=folder)


@pytest.mark.parametrize(("pool", "args"), [(WMT, PAIR), (IWSLT2017EnDe, {}), (WMT16NewsOnlyDatasetEnDe, {})])
def test_the_real_files(shared_dir, pool, args):
    args = {"data_dir": str(shared_dir / "data/multi30k"), **args}
    check_data_pool(pool, **args)
    assert [len(pool.prepare(split, **args)) for split in ("train", "val", "test")] == [29000, 1014, 1000]
    assert pool.prepare("train", max_size=1, **args).samples[0].references == [
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."
    ]
