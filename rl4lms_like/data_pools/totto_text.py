"""Linearisation of ToTTo tables to one line of text (Parikh et al. 2020, as in the paper's baselines).

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
from typing import Any, TypeAlias

Cell: TypeAlias = Mapping[str, Any]
"""Mapping with the keys `value`, `is_header`, `column_span`, `row_span`."""

Table: TypeAlias = Sequence[Sequence[Cell]]
"""Rows of cells."""


@dataclass(frozen=True)
class _Placed:
    """Cell with the columns `[start, stop)` that it covers."""

    value: str
    start: int
    stop: int
    is_header: bool

    def meets(self, other: _Placed) -> bool:
        """Return True if the two cells have a column in common."""
        return self.start < other.stop and self.stop > other.start


@dataclass(frozen=True)
class _Row:
    """Cells of a row, and those of them that are headers."""

    cells: list[_Placed]
    headers: list[_Placed]


def titles_text(page_title: str | None, section_title: str | None) -> str:
    """Return the page and section titles as a prefix of the table; empty titles are left out."""
    marks = {"page_title": page_title, "section_title": section_title}
    return "".join(f"<{mark}> {title} </{mark}> " for mark, title in marks.items() if title)


def highlighted_text(table: Table, highlighted: Sequence[tuple[int, int]]) -> str:
    """Return the highlighted cells as text, in the given order, each with its headers.

    Args:
        table: rows of cells.
        highlighted: row, and index in the row, of each highlighted cell, from 0.

    Raises:
        IndexError: a highlighted cell is not in the table.
    """
    rows = [_row(cells) for cells in table]
    return f"<table> {''.join(_marked('cell', rows, row, place) for row, place in highlighted)}</table>"


def full_text(table: Table, highlighted: Sequence[tuple[int, int]]) -> str:
    """Return all cells as text, row by row, each with its headers; highlighted cells have a separate tag.

    Args:
        table: rows of cells.
        highlighted: row, and index in the row, of each highlighted cell, from 0.

    Raises:
        IndexError: a highlighted cell is not in the table.
    """
    rows = [_row(cells) for cells in table]
    for row, place in highlighted:
        _ = rows[row].cells[place]  # raises an IndexError if the cell does not exist
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
