"""ToTTo: the table without and with titles as prompt, every annotator's sentence as reference, the row as meta data."""

from __future__ import annotations

import json

import pytest

from rl4lms_like.data_pools.totto import STAGES, ToTTo
from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.testing.checkers import check_data_pool

CELLS = [
    [{"value": "Year", "is_header": True, "column_span": 1, "row_span": 1}],
    [{"value": "2015", "is_header": False, "column_span": 1, "row_span": 1}],
]
TEXT = "<table> <cell> 2015 <col_header> Year </col_header> </cell> </table>"


def row(*finals, **changed):
    return {
        "example_id": "7",
        "table": CELLS,
        "table_page_title": "Page",
        "table_section_title": "Section",
        "highlighted_cells": [[1, 0]],
        "sentence_annotations": [{stage: f"{final} {stage[0]}" for stage in STAGES[:3]} | {"final_sentence": final}
                                 for final in finals],
    } | changed  # fmt: skip


def in_columns(annotations):
    """As older `datasets` features keep a list of dicts."""
    return {stage: [annotation[stage] for annotation in annotations] for stage in STAGES}


def test_prompt_references_and_raw_table(lay, no_datasets):
    folder = lay({"totto_dev_data.jsonl": json.dumps(row("It was 2015.", "In 2015.", overlap_subset=True))})
    (sample,) = ToTTo.prepare("val", data_dir=folder).samples
    titles = "<page_title> Page </page_title> <section_title> Section </section_title> "
    assert sample.prompt_or_input_text == f"{TEXT}{titles}{TEXT}"
    assert sample.references == ["It was 2015.", "In 2015."]
    raw = sample.meta_data["raw_table"]
    assert raw["overlap_subset"] is True and raw["table"] == CELLS and raw["example_id"] == "7"
    assert [annotation["final_sentence"] for annotation in raw["sentence_annotations"]] == sample.references


def test_the_hub_s_columns_become_the_published_form(hub):
    rows = [row("A.", "B.", overlap_subset=overlap) for overlap in ("True", "False", "None")]
    hub.serve(
        "google-research-datasets/totto",
        train=[row("A.")],
        validation=[each | {"sentence_annotations": in_columns(each["sentence_annotations"])} for each in rows],
        test=[row("")],
    )
    val = ToTTo.prepare("val").samples
    assert hub.asked[0]["files"] == "default/validation/*.parquet"
    assert [sample.meta_data["raw_table"]["overlap_subset"] for sample in val] == [True, False, False]
    assert val[0].meta_data["raw_table"]["sentence_annotations"] == row("A.", "B.")["sentence_annotations"]
    assert val[0].references == ["A.", "B."]
    assert ToTTo.prepare("test").samples[0].references == []
    check_data_pool(ToTTo)


def test_a_test_split_without_annotations_has_no_references(lay):
    unlabeled = {name: value for name, value in row().items() if name != "sentence_annotations"}
    folder = lay({"totto_data/unlabeled_totto_test_data.jsonl": json.dumps(unlabeled)})
    (sample,) = ToTTo.prepare("test", data_dir=folder).samples
    assert sample.references == [] and sample.meta_data["raw_table"]["sentence_annotations"] == []


@pytest.mark.parametrize(
    ("changed", "datum"),
    [
        ({"highlighted_cells": [[1, 3]]}, "IndexError"),
        ({"table": None}, "TypeError"),
        ({"sentence_annotations": [{"final_sentence": "x"}]}, "'sentence_annotations'"),
    ],
)
def test_what_is_wrong_is_named(lay, changed, datum):
    folder = lay({"train_sample.jsonl": json.dumps(row("x", **changed))})
    with pytest.raises(DataPoolError, match=f"train_sample.jsonl, line 1.*{datum}"):
        ToTTo.prepare("train", data_dir=folder)


def test_unknown_representations_and_columns_are_named(lay):
    nameless = {name: value for name, value in row("x").items() if name != "table"}
    folder = lay({"train_sample.jsonl": json.dumps(nameless), "dev_sample.jsonl": json.dumps(row("x"))})
    with pytest.raises(DataPoolError, match=r"line 1: .*'table'"):
        ToTTo.prepare("train", data_dir=folder)
    with pytest.raises(DataPoolError):
        ToTTo.prepare("val", representation="table", data_dir=folder)


def test_the_real_samples(shared_dir):
    folder = str(shared_dir / "data/totto_sample")
    for representation in ("subtable", "fulltable"):
        check_data_pool(ToTTo, splits=("train", "val"), data_dir=folder, representation=representation)
    train, val = ToTTo.prepare("train", data_dir=folder).samples, ToTTo.prepare("val", data_dir=folder).samples
    points = "<table> <cell> 15.3 <col_header> PPG </col_header> </cell> </table>"
    assert train[0].prompt_or_input_text == (
        f"{points}<page_title> Tobias Harris </page_title> <section_title> College </section_title> {points}"
    )
    assert [len(sample.references) for sample in val] == [3] * 5
    assert [sample.meta_data["raw_table"]["overlap_subset"] for sample in val] == [True, False, True, True, False]
    assert len(ToTTo.prepare("val", data_dir=folder, max_size=2)) == 2
    full = ToTTo.prepare("val", representation="fulltable", data_dir=folder).samples[0].prompt_or_input_text
    assert full.count("<highlighted_cell>") == 8 and full.count("<page_title>") == 1
