"""One file is shared out among the splits without overlap, and the same way every time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.data_pools.files import DataFiles
from rl4lms_like.data_pools.splits import SPLITS, Splitting
from rl4lms_like.system.errors import DataPoolError


def share_of(n_rows, split, ratios, seed):
    return Splitting(split_ratios=ratios, seed=seed).of_all(n_rows, split)


@settings(deadline=None)
@given(
    st.integers(0, 200),
    st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda ratios: sum(ratios) > 0.01),
    st.integers(0, 5),
)
def test_splits_partition_all_rows(n_rows, shares, seed):
    ratios = [fraction / sum(shares) for fraction in shares]
    parts = [share_of(n_rows, split, ratios, seed) for split in SPLITS]
    assert sorted(row for part in parts for row in part) == list(range(n_rows))
    for part, ratio in zip(parts, ratios, strict=True):
        assert abs(len(part) - n_rows * ratio) <= 1
    assert parts == [share_of(n_rows, split, ratios, seed) for split in SPLITS]


def test_the_seed_shuffles():
    shares = {seed: share_of(100, "train", (0.8, 0.1, 0.1), seed) for seed in (0, 1)}
    assert shares[0] != shares[1] and shares[0] != sorted(shares[0])


def test_less_than_everything_can_be_used():
    assert len(share_of(100, "train", (0.5, 0.0, 0.1), 0)) == 50
    assert share_of(100, "val", (0.5, 0.0, 0.1), 0) == []


@pytest.mark.parametrize("ratios", [(0.5, 0.5), (0.9, 0.1, 0.1), (1.1, -0.1, 0.0)])
def test_ratios_that_are_no_shares_are_refused(ratios):
    with pytest.raises(DataPoolError):
        share_of(10, "train", ratios, 0)


def test_a_split_nobody_knows_is_refused():
    with pytest.raises(DataPoolError):
        share_of(10, "validation", (0.8, 0.1, 0.1), 0)


def test_files_are_named_one_way():
    assert str(DataFiles("all.csv").file("val")) == "all.csv"
    assert str(DataFiles(data_files={"val": "v.csv"}).file("val")) == "v.csv"
    for path, data_files in ((None, None), ("a", {"val": "b"})):
        with pytest.raises(DataPoolError):
            DataFiles(path, data_files).file("val")
    with pytest.raises(DataPoolError, match=r"'test'.* train, val"):
        DataFiles(data_files={"train": "a", "val": "b"}).file("test")
