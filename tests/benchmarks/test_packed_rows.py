"""The benchmark of packed rows compares equal work."""

from __future__ import annotations

import sys

from benchmarks import packed_rows
from benchmarks.packed_rows import QUICK, TASKS, measure


def test_both_kinds_of_rows_have_one_loss_and_gradient():
    sizes = QUICK | {"batch": 6, "median": 24, "longest": 120}
    uneven, mixed, equal = measure(TASKS, sizes, rounds=1)
    for row in (uneven, mixed, equal):
        assert row["loss_difference"] < 1e-6 and row["gradient_difference"] < 1e-5
        assert row["tokens"] <= row["packed_positions"] <= row["padded_positions"]
    assert uneven["packed_positions"] < 0.8 * uneven["padded_positions"]
    assert equal["packed_positions"] == equal["padded_positions"] == equal["tokens"]


def test_quick_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packed_rows, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["packed_rows", "--quick"])
    packed_rows.main()
    assert "uneven" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
