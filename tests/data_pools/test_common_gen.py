"""CommonGen: prompts from concepts, and all sentences of a set as its references."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.common_gen import CommonGen
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

ARGS = {"concept_separator_token": " ", "concept_end_token": ".", "prefix": "generate a sentence with: "}
PAIRS = [
    {"concepts": ["field", "look", "stand"], "target": "He stood and looked.", "references": []},
    {"concepts": ["dog", "run"], "target": "A dog runs.", "references": []},
    {"concepts": ["look", "field", "stand"], "target": "Look, a field!", "references": []},
]
LINES = [
    {"concept_set": "field_N#look_V#stand_V", "scene": ["He stood and looked.", "Look, a field!"], "reason": ["", ""]},
    {"concept_set": "dog_N#run_V", "scene": ["A dog runs."], "reason": [""]},
]


def of_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_hub_s_pairs_in_train_and_sets_elsewhere(hub):
    sets = [{"concepts": ["a", "b"], "target": "A b.", "references": ["A b.", "B a."]}]
    unknown = [{"concepts": ["c"], "target": "", "references": []}]
    hub.serve("GEM/common_gen", train=PAIRS, validation=sets, test=unknown)
    train, val, test = (CommonGen.prepare(split, **ARGS).samples for split in ("train", "val", "test"))
    assert train[0] == Sample(
        "train_0", "generate a sentence with: field look stand.", ["He stood and looked."],
        {"concepts": ["field", "look", "stand"]},
    )  # fmt: skip
    assert [sample.references for sample in train] == [["He stood and looked."], ["A dog runs."], ["Look, a field!"]]
    assert val[0].references == ["A b.", "B a."]
    assert test[0].references == []
    assert hub.asked == [
        {"path": "GEM/common_gen", "files": f"default/{split}/*.parquet"} for split in ("train", "validation", "test")
    ]


def test_a_set_is_evaluated_once_against_all_its_sentences(lay):
    rows = [{name: row[name] for name in ("concepts", "target")} for row in PAIRS]
    folder = lay({"train.jsonl": of_lines(rows), "validation.jsonl": of_lines(rows)})
    val = CommonGen.prepare("val", data_dir=folder)
    assert [sample.references for sample in val.samples] == [
        ["He stood and looked.", "Look, a field!"],
        ["A dog runs."],
    ]
    assert val.samples[0].prompt_or_input_text == "summarize: field look stand "
    assert len(CommonGen.prepare("train", data_dir=folder)) == 3
    grouped = CommonGen.prepare("train", data_dir=folder, group_train=True)
    assert [sample.references for sample in grouped.samples] == [sample.references for sample in val.samples]


def test_the_published_lines_and_texts_give_the_same(lay, no_datasets):
    sources = "field look stand\nfield look stand\ndog run\n"
    sentences = "He stood and looked.\nLook, a field!\nA dog runs.\n"
    texts = {f"commongen.{name}.{kind}.txt": text for name in ("train", "dev", "test")
             for kind, text in (("src_alpha", sources), ("tgt", sentences))}  # fmt: skip
    left = lay(texts, "texts")
    right = lay({f"commongen.{name}.jsonl": of_lines(LINES) for name in ("train", "dev", "test")}, "lines")
    for split in ("train", "val", "test"):
        assert CommonGen.prepare(split, data_dir=left).samples == CommonGen.prepare(split, data_dir=right).samples
    check_data_pool(CommonGen, data_dir=left, **ARGS)
    assert len(CommonGen.prepare("train", data_dir=right, max_size=2)) == 2
    assert len(CommonGen.prepare("val", data_dir=right, max_size=1)) == 1


def test_rows_that_are_sets_already_stay_apart(lay):
    rows = [
        {"concept_set": "cut_V#hair_N#style_V", "scene": ["She cut and styled her hair."]},
        {"concept_set": "cut_V#hair_N#style_N", "scene": ["He cut the hair in a new style."]},
    ]
    val = CommonGen.prepare("val", data_dir=lay({"commongen.dev.jsonl": of_lines(rows)}))
    assert [sample.references for sample in val.samples] == [row["scene"] for row in rows]


@pytest.mark.parametrize("group_train", [True, False])
def test_a_set_without_sentences_is_a_prompt_in_train_too(lay, group_train):
    rows = [{"concepts": ["a", "b"], "target": ""}, {"concepts": ["c"], "target": "C."}]
    train = CommonGen.prepare("train", data_dir=lay({"train.jsonl": of_lines(rows)}), group_train=group_train)
    assert [sample.references for sample in train.samples] == [[], ["C."]]


def test_what_is_wrong_is_named(lay):
    folder = lay(
        {"commongen.train.jsonl": '{"concept_set": 3, "scene": []}\n', "dev.jsonl": '{"concepts": [], "target": "x"}'}
    )
    with pytest.raises(DataPoolError, match=r"commongen.train.jsonl, line 1, column 'concept_set': .* 3$"):
        CommonGen.prepare("train", data_dir=folder)
    with pytest.raises(DataPoolError, match=r"dev.jsonl, line 1, column 'concepts': .*\[\]"):
        CommonGen.prepare("val", data_dir=folder)


def test_the_real_files(shared_dir):
    args = {"data_dir": str(shared_dir / "data/commongen"), **ARGS}
    check_data_pool(CommonGen, **args)
    train, val, test = (CommonGen.prepare(split, **args).samples for split in ("train", "val", "test"))
    assert (len(val), len(test)) == (993, 1497)
    assert len(train) > 39000 and all(len(sample.references) == 1 for sample in train)
    assert sum(len(sample.references) for sample in val) == 4018
    assert sum(len(sample.references) > 1 for sample in test) == len(test)
    assert val[0].meta_data == {"concepts": ["field", "look", "stand"]}
