"""ToTTo (Parikh et al. 2020): one sentence about the highlighted cells of a Wikipedia table.

prompt       <table> ... </table><page_title> ... </section_title> <table> ... </table>
             the table without titles, then again with titles, as in RL4LMs; see below
references   the final sentence of each annotator: one in train, three in val, none in test
meta_data    {"raw_table": the row}, with `sentence_annotations` as a list of dicts and `overlap_subset` as a bool

Linearisation of a table to one line of text, as in the paper's baselines:

    highlighted cells    <table> <cell> 2015 <col_header> Year </col_header> </cell> ... </table>
    the whole table      <table> <row> <cell> ... </cell> <highlighted_cell> ... </highlighted_cell> </row> ... </table>
    with titles          <page_title> Colin Hanlon </page_title> <section_title> Theatre </section_title> <table> ...

The headers of a cell are found by a heuristic: the header cells to its left in its row, and the header cells in rows
above that cover one of its columns. Column positions include the column spans of cells to the left; row spans are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool, flattened
from rl4lms_like.data_pools.published import CONVERTED, HubTable, PublishedPool, Source, files_of
from rl4lms_like.data_pools.tables import cell, dict_rows, json_line_rows
from rl4lms_like.system.errors import DataPoolError

STAGES = ("original_sentence", "sentence_after_deletion", "sentence_after_ambiguity", "final_sentence")
"""Fields of an annotation: the sentence after each editing step."""

Cell: TypeAlias = Mapping[str, Any]  # mapping with the keys `value`, `is_header`, `column_span`, `row_span`
Table: TypeAlias = Sequence[Sequence[Cell]]  # rows of cells


class ToTTo(PublishedPool):
    """Tables with highlighted cells as prompts, with sentences about these cells as references."""

    id = "totto"
    hub = HubTable("google-research-datasets/totto", "default", CONVERTED)
    layouts = (
        files_of(json_line_rows, "totto_{0}_data.jsonl"),
        files_of(json_line_rows, "unlabeled_totto_{0}_data.jsonl"),
        files_of(json_line_rows, "totto_data/totto_{0}_data.jsonl"),
        files_of(json_line_rows, "totto_data/unlabeled_totto_{0}_data.jsonl"),
        files_of(json_line_rows, "{0}_sample.jsonl"),
    )

    @classmethod
    @flattened
    def prepare(
        cls, split: str, representation: Literal["subtable", "fulltable"] = "subtable", *, source: Source
    ) -> TextGenPool:
        """Build the pool of a split.

        Args:
            representation: `subtable`, the highlighted cells with their headers, or `fulltable`, all cells.
            data_dir: a local copy: `totto_{train,dev,test}_data.jsonl` (`unlabeled_totto_test_data.jsonl`), there or in
                its folder `totto_data`; the project's samples `{train,dev}_sample.jsonl`; or tables with the columns
                table, highlighted_cells, table_page_title, table_section_title, sentence_annotations (see `published`).
        """
        rows = enumerate(cls.rows(split, source))
        samples = (_sample(row, f"{split}_{index}", representation, where) for index, (where, row) in rows)
        return cls.of(samples, split, cls.id, source.max_size)


def _sample(row: Mapping[str, Any], id: str, representation: str, where: str) -> Sample:
    raw = raw_table(row, where)

    # The test split is unlabelled: its final sentences are empty (hub), or it has no annotations (published files).
    references = []
    for annotation in raw["sentence_annotations"]:
        if annotation["final_sentence"]:
            references.append(annotation["final_sentence"])
    return Sample(id, prompt_of(raw, representation, where), references, {"raw_table": raw})


def prompt_of(row: Mapping[str, Any], representation: str, where: str) -> str:
    """Return the prompt of a row: the table as text without titles, then again with titles."""
    linearise = {"subtable": highlighted_text, "fulltable": full_text}.get(representation)
    if linearise is None:
        raise DataPoolError(f"unknown representation {representation!r}; known: subtable, fulltable")
    titles = titles_text(cell(row, "table_page_title", where), cell(row, "table_section_title", where))

    # The table twice, as RL4LMs has it: models trained there expect this prompt.
    try:
        text = linearise(row["table"], [(line, index) for line, index in row["highlighted_cells"]])
        return f"{text}{titles}{text}"
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataPoolError(f"{where}: not a table with highlighted cells: {type(error).__name__}: {error}") from error


def raw_table(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a row to the format of the published files, which ToTTo's own evaluation reads.

    Raises:
        DataPoolError: a column is missing, or the annotations do not have ToTTo's format.
    """
    for name in ("table", "highlighted_cells"):
        cell(row, name, where)

    # The hub's table has the annotations column by column: {"original_sentence": [...], ...}.
    annotations = []
    try:
        for annotation in dict_rows(row.get("sentence_annotations") or [], STAGES, where):
            annotations.append({stage: annotation[stage] for stage in STAGES})
    except (KeyError, TypeError, ValueError) as error:
        expected = f"expected annotations with {', '.join(STAGES)}"
        raise DataPoolError(f"{where}, column 'sentence_annotations': {expected}: {error!r}") from error

    # A bool in the published files, a text ("True", "False", "None") in the hub's table.
    overlaps = row.get("overlap_subset") in (True, "True")
    return {**row, "sentence_annotations": annotations, "overlap_subset": overlaps}


@dataclass(frozen=True)
class _SpanningCell:
    """Cell with the columns `[start, stop)` that it covers."""

    value: str
    start: int
    stop: int
    is_header: bool

    def meets(self, other: _SpanningCell) -> bool:
        """Return True if the two cells have a column in common."""
        return self.start < other.stop and self.stop > other.start


class _Row(NamedTuple):
    """Cells of a row, and those of them that are headers."""

    cells: list[_SpanningCell]
    headers: list[_SpanningCell]


def titles_text(page_title: str | None, section_title: str | None) -> str:
    """Return the page and section titles as a prefix of the table; empty titles are left out."""
    titles = {"page_title": page_title, "section_title": section_title}
    return "".join(f"<{tag}> {title} </{tag}> " for tag, title in titles.items() if title)


def highlighted_text(table: Table, highlighted: Sequence[tuple[int, int]]) -> str:
    """Return the highlighted cells as text, in the given order, each with its headers.

    Args:
        table: rows of cells.
        highlighted: row, and index in the row, of each highlighted cell, from 0.

    Raises:
        IndexError: a highlighted cell is not in the table.
    """
    rows = [_row(cells) for cells in table]
    return f"<table> {''.join(_cell_text('cell', rows, row, index) for row, index in highlighted)}</table>"


def full_text(table: Table, highlighted: Sequence[tuple[int, int]]) -> str:
    """Return all cells as text, row by row, as `highlighted_text`; highlighted cells have a separate tag."""
    rows = [_row(cells) for cells in table]

    # A highlighted cell outside of the table must be an error here, too: the loop below would not notice it.
    for row, index in highlighted:
        _ = rows[row].cells[index]  # raises an IndexError

    highlighted_cells = frozenset(highlighted)
    text = ""
    for row, cells in enumerate(table):
        text += "<row> "
        for index in range(len(cells)):
            tag = "highlighted_cell" if (row, index) in highlighted_cells else "cell"
            text += _cell_text(tag, rows, row, index)
        text += "</row> "
    return f"<table> {text}</table>"


def _cell_text(tag: str, rows: Sequence[_Row], row: int, index: int) -> str:
    """Return a cell of a row as text, with its column headers, then its row headers."""
    target = rows[row].cells[index]

    # From the top: the headers of all rows above that cover one of the cell's columns.
    headers = ""
    for row_above in rows[:row]:
        for header in row_above.headers:
            if header.meets(target):
                headers += f"<col_header> {header.value} </col_header> "

    # From the left: the header cells before it in its row.
    for cell_before in rows[row].cells[:index]:
        if cell_before.is_header:
            headers += f"<row_header> {cell_before.value} </row_header> "
    return f"<{tag}> {target.value} {headers}</{tag}> "


def _row(cells: Sequence[Cell]) -> _Row:
    """Return the cells of a row with the columns that they cover, counted from 0 with all spans to the left."""
    spanning: list[_SpanningCell] = []
    start = 0
    for raw in cells:
        stop = start + raw["column_span"]
        spanning.append(_SpanningCell(raw["value"], start, stop, bool(raw["is_header"])))
        start = stop
    return _Row(spanning, [header for header in spanning if header.is_header])
