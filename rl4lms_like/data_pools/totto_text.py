"""A ToTTo table as one line of text (Parikh et al. 2020, the baselines' linearisation).

    highlighted cells    <table> <cell> 2015 <col_header> Year </col_header> </cell> ... </table>
    the whole table      <table> <row> <cell> ... </cell> <highlighted_cell> ... </highlighted_cell> </row> ... </table>
    with titles          <page_title> Colin Hanlon </page_title> <section_title> Theatre </section_title> <table> ...

Which headers belong to a cell is guessed: the header cells left of it in its row, and those in rows above that cover
one of its columns. Columns are counted with the spans of the cells to the left; row spans are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Cell: TypeAlias = Mapping[str, Any]
"""`value`, `is_header`, `column_span`, `row_span`."""

Table: TypeAlias = Sequence[Sequence[Cell]]
"""Rows of cells."""


@dataclass(frozen=True)
class _Placed:
    """A cell, the columns `[start, stop)` that it covers, and whether it is a header."""

    value: str
    start: int
    stop: int
    is_header: bool

    def meets(self, other: _Placed) -> bool:
        """Whether the two have a column in common."""
        return self.start < other.stop and self.stop > other.start


@dataclass(frozen=True)
class _Row:
    """A row's cells, and those of them that are headers."""

    cells: list[_Placed]
    headers: list[_Placed]


def titles_text(page_title: str | None, section_title: str | None) -> str:
    """The titles of page and section, for the front of a table; empty ones are left out."""
    marks = {"page_title": page_title, "section_title": section_title}
    return "".join(f"<{mark}> {title} </{mark}> " for mark, title in marks.items() if title)


def highlighted_text(table: Table, highlighted: Sequence[tuple[int, int]]) -> str:
    """The highlighted cells, in the order in which they are listed, each with its headers.

    Args:
        table: rows of cells.
        highlighted: row, and place in the row, of each highlighted cell, from 0.

    Raises:
        IndexError: a highlighted cell is not in the table.
    """
    rows = [_row(cells) for cells in table]
    return f"<table> {''.join(_marked('cell', rows, row, place) for row, place in highlighted)}</table>"


def full_text(table: Table, highlighted: Sequence[tuple[int, int]]) -> str:
    """All cells, row by row, each with its headers; highlighted ones have a mark of their own.

    Args:
        table: rows of cells.
        highlighted: row, and place in the row, of each highlighted cell, from 0.

    Raises:
        IndexError: a highlighted cell is not in the table.
    """
    rows = [_row(cells) for cells in table]
    for row, place in highlighted:
        _ = rows[row].cells[place]
    marked = frozenset(highlighted)
    lines = []
    for row, cells in enumerate(table):
        marks = ["highlighted_cell" if (row, place) in marked else "cell" for place in range(len(cells))]
        lines.append("".join(_marked(mark, rows, row, place) for place, mark in enumerate(marks)))
    return f"<table> {''.join(f'<row> {line}</row> ' for line in lines)}</table>"


def _marked(mark: str, rows: Sequence[_Row], row: int, place: int) -> str:
    cell = rows[row].cells[place]
    above = (header for line in rows[:row] for header in line.headers if header.meets(cell))
    left = (other for other in rows[row].cells[:place] if other.is_header)
    columns = "".join(f"<col_header> {header.value} </col_header> " for header in above)
    lines = "".join(f"<row_header> {header.value} </row_header> " for header in left)
    return f"<{mark}> {cell.value} {columns}{lines}</{mark}> "


def _row(cells: Sequence[Cell]) -> _Row:
    placed, start = [], 0
    for cell in cells:
        stop = start + cell["column_span"]
        placed.append(_Placed(cell["value"], start, stop, bool(cell["is_header"])))
        start = stop
    return _Row(placed, [cell for cell in placed if cell.is_header])
