"""Packed rows hold every token once, next to its own text, and never need more tokens or pairs than padded ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl4lms_like.core.packed_rows import PackedRows, RowPacking, balanced_bins

lengths_of_rows = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(lengths_of_rows, st.integers(1, 12), st.integers(0, 5))
def test_every_token_is_packed_once_behind_those_of_its_row(lengths, n_bins, margin):
    bins = balanced_bins(lengths, min(n_bins, len(lengths)))
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))

    # Rows of different numbers, padded on both sides by another one.
    starts = torch.arange(len(lengths)) % (margin + 1)
    matrix = torch.full((len(lengths), margin + max(lengths)), -1)
    for row, length in enumerate(lengths):
        matrix[row, starts[row] : starts[row] + length] = 100 * row + torch.arange(length)
    packed = PackedRows(starts, torch.tensor(lengths), bins)

    # By a plain loop over the packed rows.
    result, positions = packed.pack(matrix, -2), packed.position_ids()
    assert result.shape == positions.shape == packed.shape
    for rows, of_row, of_positions in zip(bins, result.tolist(), positions.tolist(), strict=True):
        expected = [100 * row + token for row in rows for token in range(lengths[row])]
        n_padding = packed.width - len(expected)
        assert of_row == expected + [-2] * n_padding
        assert of_positions == [token % 100 for token in expected] + [0] * n_padding

    # Back again, from the last token but one of each row.
    firsts = (torch.tensor(lengths) - 2).clamp_min(0)
    for row, part in enumerate(packed.from_position(result, firsts, 3).tolist()):
        last = lengths[row] - 1
        assert part == [100 * row + min(int(firsts[row]) + column, last) for column in range(3)]


@given(lengths_of_rows, st.sampled_from([1, 8, 64, 4096]))
def test_packed_rows_have_fewer_tokens_and_no_more_pairs(lengths, hidden_size):
    bins = RowPacking(hidden_size).bins(lengths)
    if bins is None:
        return
    width = max(sum(lengths[row] for row in rows) for rows in bins)
    assert len(bins) < len(lengths)
    assert len(bins) * width <= len(lengths) * max(lengths)
    assert len(bins) * width**2 <= len(lengths) * max(lengths) ** 2


@pytest.mark.parametrize("hidden_size", [16, 4096])
def test_rows_of_one_length_stay_padded(hidden_size):
    assert RowPacking(hidden_size).bins([9] * 20) is None
    assert RowPacking(hidden_size, one_row=True).bins([9] * 20) is None
    assert RowPacking(hidden_size).bins([7]) is None


def test_narrow_models_get_narrow_rows():
    """Attention is most of their work, and it has the width of a row as a factor."""
    # 10 rows of 75 tokens, or 7 of 100: less padding, but more pairs of tokens.
    lengths = [60, *[25] * 20]
    n_rows = [len(RowPacking(hidden_size).bins(lengths)) for hidden_size in (1, 4096)]
    assert n_rows == [10, 7]


def test_attention_without_a_mask_gets_one_row():
    assert RowPacking(1, one_row=True).bins([60, *[3] * 40]) == [list(range(41))]
