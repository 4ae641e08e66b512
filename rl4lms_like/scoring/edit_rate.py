"""Edits of the translation edit rate (Snover et al., 2006): the same number as in sacrebleu, faster for long texts.

    generated    sat on the mat | the cat        moving a run of words is one edit
    reference    the cat | sat on the mat        1 move, and no word to insert, delete or replace

Moves are searched as in Tercom: the best move is made as long as it saves edits. A run has at most 10 words and starts
at most 50 words from its position in the reference. After 1,000 tries the search ends. The edits saved by a move are
computed only between its two ends:

    head[i]    edits from both starts to `i` generated words and each number of reference words
    tail[i]    edits from there to both ends
    a move     head[start] -> one row per changed word -> the minimum of (row + tail[stop])

As in Tercom, rows have only the columns near the diagonal (the beam); alignments outside the beam are ignored.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from operator import add

_LONGEST_RUN = 10
_FARTHEST = 50
_MOST_TRIES = 1000
_BEAM = 25
_FAR = 10**9  # more edits than any two texts need
_Move = tuple[int, int, int]  # first word, number of words, and the word before which they are inserted


def edits(generated: Sequence[str], reference: Sequence[str]) -> int:
    """Return the number of edits that turn the generated words into those of the reference."""
    if not generated or not reference:
        return len(generated) + len(reference)
    words, tries, moved = list(generated), 0, 0
    columns = _columns_of_rows(len(words), len(reference))
    while True:
        tables = _Tables(words, reference, columns)
        moves = list(islice(_moves(tables), _MOST_TRIES - tries))
        tries += len(moves)
        if not moves or tries >= _MOST_TRIES:
            return moved + tables.edits
        left, _, _, _, best = min((tables.edits_after(move), -move[1], move[0], move[2], move) for move in set(moves))
        if left >= tables.edits:
            return moved + tables.edits
        start, stop, changed = _changed(words, best)
        words[start:stop] = changed
        moved += 1


class _Tables:
    """Edits between generated and reference words, and from every position in both to their starts and ends."""

    def __init__(self, words: Sequence[str], reference: Sequence[str], columns: Sequence[range]) -> None:
        self.words = words
        self.reference = reference
        self._columns = columns
        self._head = [list(columns[0])]
        for row, word in enumerate(words, 1):
            self._head.append(self._next(self._head[-1], row, word))
        self.edits = self._head[-1][-1]

    def edits_after(self, move: _Move) -> int:
        """Return the number of edits that are left after a move."""
        start, stop, changed = _changed(self.words, move)
        costs = self._head[start]
        for row, word in enumerate(changed, start + 1):
            costs = self._next(costs, row, word)
        return min(map(add, costs, self._tail[stop]))

    def alignment(self) -> tuple[list[int], list[bool], list[bool]]:
        """Return one alignment with the fewest edits.

        Returns:
            For each number of reference words the number of generated words aligned so far; for each generated word
            and each reference word whether it is not aligned with an equal word.
        """
        row, column = len(self.words), len(self.reference)
        read = [0] * (column + 1)
        wrong, missing = [True] * row, [True] * column
        while row or column:
            read[column] = row
            here = self._edits_to(row, column)
            same = row > 0 < column and self.words[row - 1] == self.reference[column - 1]
            if here == self._edits_to(row - 1, column - 1) + (not same):
                row, column = row - 1, column - 1
                wrong[row] = missing[column] = not same
            elif here == self._edits_to(row - 1, column) + 1:
                row -= 1
            else:
                column -= 1
        read[0] = 0
        return read, wrong, missing

    @cached_property
    def _tail(self) -> list[list[int]]:
        others: list[str | None] = [*self.reference, None]
        last = len(self.words)
        rows = [[len(self.reference) - column for column in self._columns[last]]]
        for row in range(last - 1, -1, -1):
            columns, below = self._columns[row], self._columns[row + 1]
            span = _cells(rows[-1], below.start, columns.start, columns.stop + 1)
            rows.append(_row(span[::-1], others[columns.start : columns.stop][::-1], self.words[row])[::-1])
        return rows[::-1]

    def _next(self, above: list[int], row: int, word: str) -> list[int]:
        columns = self._columns[row]
        span = _cells(above, self._columns[row - 1].start, columns.start - 1, columns.stop)
        return _row(span, self._before[columns.start : columns.stop], word)

    @cached_property
    def _before(self) -> list[str | None]:
        return [None, *self.reference]

    def _edits_to(self, row: int, column: int) -> int:
        if row < 0 or column not in self._columns[row]:
            return _FAR
        return self._head[row][column - self._columns[row].start]


def _columns_of_rows(n_generated: int, n_reference: int) -> list[range]:
    slope = n_reference / n_generated
    beam = _BEAM if slope / 2 <= _BEAM else math.ceil(slope / 2 + _BEAM)
    middles = [math.floor(row * slope) for row in range(n_generated + 1)]
    columns = [range(max(0, middle - beam), min(n_reference + 1, middle + beam)) for middle in middles]
    columns[0] = range(n_reference + 1)
    columns[-1] = range(columns[-1].start, n_reference + 1)
    return columns


def _cells(row: list[int], first: int, start: int, stop: int) -> list[int]:
    """Return columns `start` to `stop` of a row whose first column is `first`; columns it lacks are `_FAR`."""
    before = max(first - start, 0)
    inside = row[max(start - first, 0) : stop - first]
    return [_FAR] * before + inside + [_FAR] * (stop - start - before - len(inside))


def _row(above: list[int], others: Sequence[str | None], word: str) -> list[int]:
    """Return a row of edits from the row above, which starts one column earlier, and the words of the columns."""
    row, left = [], _FAR
    diagonal = above[0]
    for up, other in zip(islice(above, 1, None), others, strict=True):
        cost = diagonal if other == word else diagonal + 1
        if up < cost or left < cost:
            cost = (up if up < left else left) + 1
        row.append(cost)
        left, diagonal = cost, up
    return row


def _moves(tables: _Tables) -> Iterator[_Move]:
    """Yield moves to try: runs that the reference has elsewhere, wrong where they are and missing where they go."""
    places: dict[str, list[int]] = {}
    for index, word in enumerate(tables.reference):
        places.setdefault(word, []).append(index)
    read, wrong, missing = tables.alignment()
    for first, word in enumerate(tables.words):
        found = places.get(word, [])
        near = slice(bisect_left(found, first - _FARTHEST), bisect_right(found, first + _FARTHEST))
        for place in found[near]:
            for length in range(1, _common(tables, first, place) + 1):
                helps = any(wrong[first : first + length]) and any(missing[place : place + length])
                if helps and not first < read[place + 1] <= first + length:
                    for before in dict.fromkeys(read[place : place + length + 1]):
                        yield first, length, before


def _common(tables: _Tables, first: int, place: int) -> int:
    """Return the number of equal words from the two positions on."""
    most = min(_LONGEST_RUN, len(tables.words) - first, len(tables.reference) - place)
    differs = (index for index in range(most) if tables.words[first + index] != tables.reference[place + index])
    return next(differs, most)


def _changed(words: Sequence[str], move: _Move) -> tuple[int, int, Sequence[str]]:
    """Return the start and the end of the words that a move changes, and the words that replace them."""
    first, length, before = move
    run = list(words[first : first + length])
    if before < first:
        return before, first + length, [*run, *words[before:first]]
    stop = before if before > first + length else min(before + length, len(words))
    return first, stop, [*words[first + length : stop], *run]
