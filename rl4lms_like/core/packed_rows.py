"""Rows of unequal length behind one another in fewer, longer rows, with hardly any padding.

    padded     a1 a2 a3 a4      packed      a1 a2 a3 a4
    [n, m]     b1 .  .  .       [k, width]  b1 c1 c2 .
               c1 c2 .  .
                                positions   0  1  2  3
                                            0  0  1  0

The positions of a text begin with 0. A model of transformers that gets them and no attention mask lets a token attend
to those of its own text only. It computes attention for all `width**2` pairs of tokens of a row, and masks those of
different texts, so that a single long row would be slow: the rows have the width with the lowest estimated cost. Flash
attention computes pairs within texts only; its texts are all in one row.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rl4lms_like.core.devices import to_device

ATTENTION_WIDTHS = 4
"""Width of a row at which attention takes as long as the rest of a layer, in sizes of a hidden state: measured 2.9 to
6.7, forward and backward pass on a processor, with hidden states of 128 and 512 numbers, `sdpa` and `eager`."""

LARGEST_COST = 0.9
"""Largest estimated cost of packed rows, as a fraction of that of padded rows, at which rows are packed."""


@dataclass(frozen=True)
class PackedRows:
    """Places of the tokens of `n` padded rows in `k` packed ones; a place is `packed row * width + column`.

    Args:
        starts: `[n]`, column of each row's first token; the others follow it without gaps.
        lengths: `[n]`, number of tokens of each row, at least one.
        bins: the rows that each packed row has, in their order.
    """

    starts: Tensor
    lengths: Tensor
    bins: Sequence[Sequence[int]]

    @cached_property
    def width(self) -> int:
        """Number of columns of a packed row."""
        return max(int(self.lengths[list(rows)].sum()) for rows in self.bins)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of packed rows, and of their columns."""
        return len(self.bins), self.width

    @cached_property
    def first_places(self) -> Tensor:
        """Place of each row's first token, `[n]`."""
        places = torch.zeros_like(self.lengths)
        for number, rows in enumerate(self.bins):
            # A row begins after the tokens of those before it in the same packed row.
            lengths = self.lengths[list(rows)]
            places[list(rows)] = number * self.width + lengths.cumsum(0) - lengths
        return places

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, position in its text, and place of each token, `[n_tokens]` each."""
        rows = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

        # Numbered through all rows, the first token of a row has the number of tokens before it.
        n_before = self.lengths.cumsum(0) - self.lengths  # [n]
        positions = torch.arange(len(rows)) - n_before[rows]
        return rows, positions, self.first_places[rows] + positions

    def position_ids(self) -> Tensor:
        """Return the position of each token in its text `[k, width]`."""
        _, positions, places = self._tokens

        # With position 0, each token of padding is a text of its own, to which no other token attends.
        flat = torch.zeros(len(self.bins) * self.width, dtype=torch.long)
        return flat.index_copy(0, places, positions).view(self.shape)

    def pack(self, matrix: Tensor, fill: float) -> Tensor:
        """Return the entries of tokens in a matrix of padded rows `[n, m]` as `[k, width]`, with `fill` at padding."""
        rows, positions, places = self._tokens
        columns = self.starts[rows] + positions
        entries = matrix[to_device(rows, matrix.device), to_device(columns, matrix.device)]  # [n_tokens]

        flat = matrix.new_full((len(self.bins) * self.width,), fill)
        return flat.index_copy(0, to_device(places, matrix.device), entries).view(self.shape)

    def from_position(self, outputs: Tensor, firsts: Tensor, n_columns: int) -> Tensor:
        """Return a part of each row's outputs, padded on the right.

        Args:
            outputs: `[k, width, ...]`.
            firsts: `[n]`, position in its text of the first output of each row that is returned.
            n_columns: number of outputs of the longest part.

        Returns:
            `[n, n_columns, ...]`; after a row's last token, its output again.
        """
        # The limit keeps padding within the row's own text: it may be read, but never counts.
        positions = (firsts[:, None] + torch.arange(n_columns)).minimum(self.lengths[:, None] - 1)
        places = self.first_places[:, None] + positions  # [n, n_columns]
        return outputs.flatten(0, 1)[to_device(places, outputs.device)]


@dataclass(frozen=True)
class RowPacking:
    """Choice of the packed rows of a batch, by the lengths of its rows.

    Args:
        hidden_size: width of the model's hidden states.
        one_row: True for attention without a mask, to which texts in one row cost no more than in several.
    """

    hidden_size: int
    one_row: bool = False

    def packed(self, lengths: Tensor, starts: Tensor | None = None) -> PackedRows | None:
        """Return the fastest packed rows, or None if padded ones are about as fast.

        Args:
            lengths: `[n]`, number of tokens of each row, in main memory.
            starts: `[n]`, column of each row's first token; default: 0.
        """
        bins = self.bins(lengths.tolist())
        if bins is None:
            return None
        return PackedRows(torch.zeros_like(lengths) if starts is None else starts, lengths, bins)

    def bins(self, lengths: Sequence[int]) -> list[list[int]] | None:
        """Return the rows of each packed row, or None if padded rows are about as fast."""
        longest = max(lengths)
        n_tokens = sum(lengths)

        # Without a mask, only the number of tokens counts.
        if self.one_row:
            is_faster = n_tokens <= LARGEST_COST * len(lengths) * longest
            return [list(range(len(lengths)))] if is_faster else None

        # Padded rows, unless others cost less.
        best = None
        lowest_cost = LARGEST_COST * self._cost(len(lengths), longest)

        # No row is narrower than the longest text; at that width at least `n_tokens / longest` rows are needed. From
        # there down to a single row, each candidate has about 0.7 times as many rows as the one before.
        n_bins = math.ceil(n_tokens / longest)
        while n_bins:
            bins = balanced_bins(lengths, n_bins)
            width = max(sum(lengths[row] for row in rows) for rows in bins)
            cost = self._cost(n_bins, width)

            # No more pairs of tokens than padded rows have: some kernels keep a number for each pair in memory.
            if cost <= lowest_cost and n_bins * width**2 <= len(lengths) * longest**2:
                lowest_cost = cost
                best = bins
            n_bins = min(round(n_bins / 2**0.5), n_bins - 1)
        return best

    def _cost(self, n_rows: int, width: int) -> float:
        """Return the estimated cost of a pass over rows of one width, in a unit of its own."""
        # Linear layers cost the same for each token; attention costs `width` more for each, because it has all pairs of
        # a row. At a width of ATTENTION_WIDTHS hidden states, both terms are equal.
        return n_rows * width * (ATTENTION_WIDTHS * self.hidden_size + width)


def balanced_bins(lengths: Sequence[int], n_bins: int) -> list[list[int]]:
    """Return rows in bins of about equal numbers of tokens: the longest first, each in the bin with fewest so far."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]

    # A heap of (number of tokens, bin): its first entry is the bin with the fewest.
    loads = [(0, number) for number in range(n_bins)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, number = heapq.heappop(loads)
        bins[number].append(row)
        heapq.heappush(loads, (load + lengths[row], number))
    return bins
