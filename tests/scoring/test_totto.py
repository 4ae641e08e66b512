"""What ToTTo's scripts read of a sample."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.scoring.totto import bleu, parent, totto_line, totto_sample, totto_samples


def cell(value: str, *, header: bool = False) -> dict:
    return {"value": value, "is_header": header, "column_span": 1, "row_span": 1}


def raw_table(*finals: str, **changes) -> dict:
    return {
        "table": [[cell("Year", header=True), cell("Role | play")], [cell("2015"), cell(" ")]],
        "table_page_title": "Colin Hanlon",
        "table_section_title": "Theatre",
        "table_section_text": "",
        "highlighted_cells": [[1, 0]],
        "sentence_annotations": [{"final_sentence": text} for text in finals],
        "overlap_subset": True,
        **changes,
    }


def test_entries_are_the_values_of_cells_and_titles_without_empty_ones():
    sample = totto_sample(raw_table("In 2015 , he played ."))
    assert sample.precision_entries == ("year", "role - play", "2015", "colin hanlon", "theatre")
    assert sample.recall_entries == ("2015", "colin hanlon", "theatre")
    assert sample.references == ("in 2015, he played.", "<null>", "<null>")
    assert sample.overlap


def test_annotations_may_have_the_hubs_form_and_overlap_may_be_missing():
    columns = raw_table(sentence_annotations={"final_sentence": ["One.", "Two."]})
    del columns["overlap_subset"]
    sample = totto_sample(columns)
    assert sample.references == ("one.", "two.", "<null>")
    assert not sample.overlap


def test_a_line_break_in_a_text_is_a_space_and_nothing_is_null():
    assert totto_line(" A\nB ") == "a b"
    assert totto_line(" \n") == "<null>"


@pytest.mark.parametrize("meta_info", [None, {}, {"raw_table": None}])
def test_a_sample_without_its_table_names_the_pool_that_gives_it(meta_info):
    with pytest.raises(ValueError, match=r"text 0 .*'raw_table'"):
        totto_samples([meta_info], "the reward 'parent'")


def test_a_table_of_another_form_is_named():
    with pytest.raises(ValueError, match="'table_page_title'"):
        totto_sample({"table": []})


def test_a_copy_of_a_reference_that_says_everything_is_perfect():
    (score,) = parent(["Theatre 2015 Colin Hanlon"], [totto_sample(raw_table("Theatre 2015 Colin Hanlon"))])
    assert score == pytest.approx((1, 1, 1))


def test_a_sample_without_values_or_references_is_defined():
    bare = {"highlighted_cells": [], "table": [], "table_page_title": "", "table_section_title": "<skipped>"}
    with_reference, without = totto_sample(raw_table("A dog runs.", **bare)), totto_sample(raw_table("", **bare))
    assert parent(["A dog runs."], [with_reference])[0].f_score == pytest.approx(1)
    assert math.isnan(parent(["A dog runs."], [without])[0].f_score)
    assert math.isnan(bleu(["A dog runs."], [without]))


@pytest.mark.parametrize(("written", "overlap"), [("True", True), ("False", False), ("none", False), (True, True)])
def test_the_hubs_overlap_is_a_text(written, overlap):
    assert totto_sample(raw_table("One.", overlap_subset=written)).overlap is overlap


def test_the_text_whose_table_has_another_form_is_named():
    infos = [{"raw_table": raw_table("One.")}, {"raw_table": {"table": []}}]
    with pytest.raises(ValueError, match="text 1: raw_table"):
        totto_samples(infos, "the reward 'parent'")
