"""IMDb: halves of reviews, splits that share no review, the same in every process."""

from __future__ import annotations

import datasets
import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.imdb import IMDB, IMDBForSeq2Seq, halves
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

REVIEWS = [{"text": f"Review {index} is  the best", "label": index % 2} for index in range(50)]
TESTS = [{"text": f"Other {index} was so so", "label": index % 2} for index in range(5010)]


@pytest.fixture
def served(hub):
    hub.serve("stanfordnlp/imdb", "plain_text", train=REVIEWS, test=TESTS, unsupervised=[{"text": "?", "label": -1}])
    return hub


@pytest.fixture
def acl(lay):
    files = {f"aclImdb/{split}/{kind}/{n}_7.txt": f"{split} {kind} review {n} <br /> ends here"
             for split in ("train", "test") for kind in ("pos", "neg") for n in (0, 2, 10, 9, 1)}  # fmt: skip
    return lay(files)


def test_the_prompt_is_the_first_half_of_the_words_rounded_down(served):
    assert halves("a b c d e") == ("a b", "c d e")
    sample = IMDB.prepare("val").samples[0]
    assert sample.prompt_or_input_text + " " == sample.references[0][: len(sample.prompt_or_input_text) + 1]
    assert sample.references[0].startswith("Review ") and sample.meta_data is None
    assert served.asked[0] == {"path": "stanfordnlp/imdb", "name": "plain_text", "revision": None}


@pytest.mark.parametrize("seed", [0, 42])
def test_the_splits_are_those_that_rl4lms_draws_with_the_seed(served, seed):
    shuffled = datasets.Dataset.from_list(REVIEWS).shuffle(seed=seed)["text"]
    pools = {split: IMDB.prepare(split, seed=seed) for split in ("train", "val", "test")}
    assert [sample.references[0] for sample in pools["train"].samples] == shuffled[:40]
    assert [sample.references[0] for sample in pools["val"].samples] == shuffled[40:]
    tests = datasets.Dataset.from_list(TESTS).shuffle(seed=seed)["text"]
    assert [sample.references[0] for sample in pools["test"].samples] == tests[:5000]
    assert [sample.id for sample in pools["val"].samples[:2]] == ["val_0", "val_1"]


@pytest.mark.parametrize("pool", [IMDB, IMDBForSeq2Seq])
def test_a_seed_need_not_be_given(served, pool):
    assert pool.prepare("train").samples == pool.prepare("train", seed=42).samples


@pytest.mark.parametrize("pool", [IMDB, IMDBForSeq2Seq])
def test_train_and_val_share_no_review_and_do_not_change(served, pool):
    train, val = pool.prepare("train"), pool.prepare("val")
    texts = [{(s.meta_data or {}).get("reference", s.references[0]) for s in split.samples} for split in (train, val)]
    assert texts[0] and texts[1] and not texts[0] & texts[1]
    assert train.samples == pool.prepare("train").samples
    assert train.samples != pool.prepare("train", seed=1).samples


def test_to_learn_from_there_are_positive_reviews_only(served):
    train = IMDBForSeq2Seq.prepare("train")
    labels = {row["text"]: row["label"] for row in REVIEWS}
    assert {labels[sample.meta_data["reference"]] for sample in train.samples} == {1}
    assert {labels[sample.meta_data["reference"]] for sample in IMDBForSeq2Seq.prepare("val").samples} == {0, 1}
    sample = train.samples[0]
    assert f"{sample.prompt_or_input_text} {sample.references[0]}" == sample.meta_data["reference"]
    half = IMDBForSeq2Seq.prepare("train", positive_ratio=0.5)
    assert half.samples == train.samples[: len(train) // 2]


def test_max_size_limits_each_split(served):
    assert len(IMDB.prepare("train", max_size=3)) == len(IMDBForSeq2Seq.prepare("test", max_size=3)) == 3


@pytest.mark.parametrize("pool", [IMDB, IMDBForSeq2Seq])
def test_the_published_folder_is_read_without_datasets(acl, pool, no_datasets):
    check_data_pool(pool, data_dir=acl)
    check_data_pool(pool, data_dir=f"{acl}/aclImdb")


def test_texts_of_the_published_folder_keep_their_labels_and_order(acl):
    train = IMDBForSeq2Seq.prepare("train", data_dir=acl)
    assert all(" pos " in sample.meta_data["reference"] for sample in train.samples)
    everything = [s.references[0] for split in ("train", "val") for s in IMDB.prepare(split, data_dir=acl).samples]
    order = datasets.Dataset.from_dict({"i": list(range(10))}).shuffle(seed=42)["i"]
    in_order = [f"train {kind} review {n} <br /> ends here" for kind in ("neg", "pos") for n in (0, 1, 2, 9, 10)]
    assert everything == [in_order[index] for index in order]


def test_csv_labels_are_numbers(lay):
    rows = "text,label\n" + "".join(f"this is row {n},{n % 2}\n" for n in range(10))
    folder = lay({"train.csv": rows, "test.csv": rows})
    check_data_pool(IMDBForSeq2Seq, data_dir=folder)
    broken = lay({"train.csv": rows.replace(",1", ",good"), "test.csv": rows}, "broken")
    with pytest.raises(DataPoolError, match=r"train.csv, line \d+, column 'label': .*'good'"):
        IMDBForSeq2Seq.prepare("train", data_dir=broken)
    assert isinstance(IMDB.prepare("train", data_dir=broken).samples[0], Sample)
