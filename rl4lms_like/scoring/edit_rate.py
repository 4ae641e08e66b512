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

# Tercom's limits, without which the search for moves would not end in useful time.
_LONGEST_RUN = 10  # words that are moved together
_FARTHEST = 50  # words between the two ends of a move
_MOST_TRIES = 1000
_BEAM = 25  # columns on each side of the diagonal

_FAR = 10**9  # more edits than any two texts need
_Move = tuple[int, int, int]  # first word, number of words, and the word before which they are inserted


def edits(generated: Sequence[str], reference: Sequence[str]) -> int:
    """Return the number of edits that turn the generated words into those of the reference."""
    if not generated or not reference:
        return len(generated) + len(reference)

    # TER = (moves + edits after the moves) / reference words, with the moves of a greedy search (Snover et al., 2006,
    # algorithm 1): finding the fewest edits with moves is NP-complete.
    words = list(generated)
    n_tries = 0
    n_moves = 0
    columns = _columns_of_rows(len(words), len(reference))
    while True:
        tables = _Tables(words, reference, columns)
        moves = list(islice(_moves(tables), _MOST_TRIES - n_tries))
        n_tries += len(moves)
        if not moves or n_tries >= _MOST_TRIES:
            return n_moves + tables.edits

        # Of equally good moves Tercom takes the longest run, then the first one, then the one that goes to the front.
        ranked = []
        for move in set(moves):
            first, length, before = move
            ranked.append((tables.edits_after(move), -length, first, before, move))
        edits_left, _, _, _, best_move = min(ranked)

        # A move costs one edit, but needs to save only one to be made, as in Tercom.
        if edits_left >= tables.edits:
            return n_moves + tables.edits
        start, stop, changed = _changed(words, best_move)
        words[start:stop] = changed
        n_moves += 1


class _Tables:
    """Edits between generated and reference words, and from every position in both to their starts and ends."""

    def __init__(self, words: Sequence[str], reference: Sequence[str], columns: Sequence[range]) -> None:
        self.words = words
        self.reference = reference
        self._columns = columns

        # head[i] has an entry for each column of columns[i]. Without generated words, all reference words are inserted:
        # head[0][j] = j.
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

        # An alignment passes row `stop` in some column: the cheapest way there plus the cheapest way to the end.
        return min(map(add, costs, self._tail[stop]))

    def alignment(self) -> tuple[list[int], list[bool], list[bool]]:
        """Return one alignment with the fewest edits.

        Returns:
            For each number of reference words the number of generated words aligned so far; for each generated word
            and each reference word whether it is not aligned with an equal word.
        """
        row = len(self.words)
        column = len(self.reference)
        n_aligned = [0] * (column + 1)
        is_wrong = [True] * row
        is_missing = [True] * column

        # From the end to the start. There may be several alignments with the fewest edits: in Tercom, a pair of words
        # comes before a deletion, and a deletion before an insertion. Which one it is decides about the moves.
        while row or column:
            n_aligned[column] = row
            here = self._edits_to(row, column)
            is_equal = row > 0 < column and self.words[row - 1] == self.reference[column - 1]
            if here == self._edits_to(row - 1, column - 1) + (not is_equal):
                row -= 1
                column -= 1
                is_wrong[row] = is_missing[column] = not is_equal
            elif here == self._edits_to(row - 1, column) + 1:
                row -= 1
            else:
                column -= 1
        n_aligned[0] = 0
        return n_aligned, is_wrong, is_missing

    @cached_property
    def _tail(self) -> list[list[int]]:
        # The same recursion from the end: a row is computed from the row below it, from right to left, so all three
        # lists are reversed for `_row`. The column behind the last word has no word to align with.
        words_after: list[str | None] = [*self.reference, None]
        last = len(self.words)
        rows = [[len(self.reference) - column for column in self._columns[last]]]

        for row in range(last - 1, -1, -1):
            columns = self._columns[row]
            below = _cells(rows[-1], self._columns[row + 1].start, columns.start, columns.stop + 1)
            others = words_after[columns.start : columns.stop]
            rows.append(_row(below[::-1], others[::-1], self.words[row])[::-1])
        return rows[::-1]

    def _next(self, above: list[int], row: int, word: str) -> list[int]:
        """Return the edits to each column of a row, from those to the row above."""
        columns = self._columns[row]
        above = _cells(above, self._columns[row - 1].start, columns.start - 1, columns.stop)
        return _row(above, self._words_before[columns.start : columns.stop], word)

    @cached_property
    def _words_before(self) -> list[str | None]:
        """Reference word before each column; column 0 has none."""
        return [None, *self.reference]

    def _edits_to(self, row: int, column: int) -> int:
        if row < 0 or column not in self._columns[row]:
            return _FAR
        return self._head[row][column - self._columns[row].start]


def _columns_of_rows(n_generated: int, n_reference: int) -> list[range]:
    """Return the columns of each row: those within the beam around the diagonal."""
    # If the diagonal is steep, the beam is wider, so that the columns of two rows overlap.
    slope = n_reference / n_generated
    beam = _BEAM if slope / 2 <= _BEAM else math.ceil(slope / 2 + _BEAM)
    columns = []
    for row in range(n_generated + 1):
        middle = math.floor(row * slope)
        columns.append(range(max(0, middle - beam), min(n_reference + 1, middle + beam)))

    # The first row is complete, and the last one goes to the end, where both texts are read.
    columns[0] = range(n_reference + 1)
    columns[-1] = range(columns[-1].start, n_reference + 1)
    return columns


def _cells(row: list[int], first: int, start: int, stop: int) -> list[int]:
    """Return columns `start` to `stop` of a row whose first column is `first`; columns it lacks are `_FAR`."""
    n_before = max(first - start, 0)
    inside = row[max(start - first, 0) : stop - first]
    n_after = stop - start - n_before - len(inside)
    return [_FAR] * n_before + inside + [_FAR] * n_after


def _row(above: list[int], others: Sequence[str | None], word: str) -> list[int]:
    """Return a row of edits from the row above, which starts one column earlier, and the words of the columns."""
    # E[i, j] = min(E[i-1, j-1] + [words differ], E[i-1, j] + 1, E[i, j-1] + 1), for replace, delete and insert. The
    # comparisons are written out because this is the inner loop of the metric.
    row = []
    left = _FAR
    diagonal = above[0]

    for up, other in zip(islice(above, 1, None), others, strict=True):
        cost = diagonal if other == word else diagonal + 1
        if up < cost or left < cost:
            cost = (up if up < left else left) + 1
        row.append(cost)
        left = cost
        diagonal = up
    return row


def _moves(tables: _Tables) -> Iterator[_Move]:
    """Yield moves to try: runs that the reference has elsewhere, wrong where they are and missing where they go."""
    positions: dict[str, list[int]] = {}
    for index, word in enumerate(tables.reference):
        positions.setdefault(word, []).append(index)

    n_aligned, is_wrong, is_missing = tables.alignment()
    for first, word in enumerate(tables.words):
        # Positions of the word in the reference, in order, of which only those near `first` are of interest.
        targets = positions.get(word, [])
        near = slice(bisect_left(targets, first - _FARTHEST), bisect_right(targets, first + _FARTHEST))
        for target in targets[near]:
            for length in range(1, _n_common(tables, first, target) + 1):
                # Moving words that are right, or to a position that has them already, saves no edit. If the target is
                # aligned with the run itself, the run would move into itself.
                helps = any(is_wrong[first : first + length]) and any(is_missing[target : target + length])
                if helps and not first < n_aligned[target + 1] <= first + length:
                    for before in dict.fromkeys(n_aligned[target : target + length + 1]):
                        yield first, length, before


def _n_common(tables: _Tables, first: int, target: int) -> int:
    """Return the number of equal words from the two positions on."""
    most = min(_LONGEST_RUN, len(tables.words) - first, len(tables.reference) - target)
    for index in range(most):
        if tables.words[first + index] != tables.reference[target + index]:
            return index
    return most


def _changed(words: Sequence[str], move: _Move) -> tuple[int, int, Sequence[str]]:
    """Return the start and the end of the words that a move changes, and the words that replace them."""
    first, length, before = move
    run = list(words[first : first + length])
    if before < first:
        return before, first + length, [*run, *words[before:first]]

    # Towards the end. A position inside the run is no target; as in sacrebleu, the run then moves by as many words as
    # the position is behind its start.
    stop = before if before > first + length else min(before + length, len(words))
    return first, stop, [*words[first + length : stop], *run]
