"""ToTTo tables as text, letter by letter as the project's baselines have them."""

from __future__ import annotations

import pytest

from rl4lms_like.data_pools.totto import full_text, highlighted_text, titles_text


def cell(value, is_header=False, column_span=1):
    return {"value": value, "is_header": is_header, "column_span": column_span, "row_span": 1}


TABLE = [
    [cell("", True), cell("Votes", True, 2)],
    [cell("Name", True), cell("n", True), cell("%", True)],
    [cell("Ann", True), cell("12"), cell("60")],
    [cell("Bob", True), cell("all of it", column_span=2)],
]


def test_a_cell_has_the_headers_above_its_columns_and_left_of_it():
    assert highlighted_text(TABLE, [(2, 2), (2, 1)]) == (
        "<table> <cell> 60 <col_header> Votes </col_header> <col_header> % </col_header> "
        "<row_header> Ann </row_header> </cell> "
        "<cell> 12 <col_header> Votes </col_header> <col_header> n </col_header> "
        "<row_header> Ann </row_header> </cell> </table>"
    )


def test_a_wide_cell_has_the_headers_of_all_its_columns():
    assert highlighted_text(TABLE, [(3, 1)]) == (
        "<table> <cell> all of it <col_header> Votes </col_header> <col_header> n </col_header> "
        "<col_header> % </col_header> <row_header> Bob </row_header> </cell> </table>"
    )


def test_spans_to_the_left_move_a_cell_s_columns():
    table = [[cell("A", True), cell("B", True), cell("C", True)], [cell("wide", column_span=2), cell("x")]]
    assert "x <col_header> C </col_header> </cell>" in highlighted_text(table, [(1, 1)])


def test_headers_below_and_to_the_right_do_not_count():
    table = [[cell("x"), cell("R", True)], [cell("C", True), cell("y")]]
    assert highlighted_text(table, [(0, 0)]) == "<table> <cell> x </cell> </table>"


def test_the_whole_table_has_every_cell_once_and_marks_the_highlighted():
    assert full_text([[cell("A", True), cell("B", True)], [cell("1"), cell("2")]], [(1, 1)]) == (
        "<table> <row> <cell> A </cell> <cell> B <row_header> A </row_header> </cell> </row> "
        "<row> <cell> 1 <col_header> A </col_header> </cell> "
        "<highlighted_cell> 2 <col_header> B </col_header> </highlighted_cell> </row> </table>"
    )


@pytest.mark.parametrize("linearise", [highlighted_text, full_text])
def test_nothing_highlighted_and_nothing_there(linearise):
    assert linearise([], []) == "<table> </table>"
    with pytest.raises(IndexError):
        linearise(TABLE, [(3, 2)])


def test_empty_titles_are_left_out():
    assert titles_text("Page", "Section") == (
        "<page_title> Page </page_title> <section_title> Section </section_title> "
    )
    assert titles_text("Page", "") == "<page_title> Page </page_title> "
    assert titles_text(None, None) == ""
