"""Splits train, val and test: their common names, and the division of one table among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl4lms_like.system.errors import DataPoolError
from rl4lms_like.system.numbers import Count

SPLITS = ("train", "val", "test")


def names_of(split: str) -> tuple[str, ...]:
    """Return the common names of a split in published datasets, or raise a `DataPoolError` for an unknown split."""
    if split not in SPLITS:
        raise DataPoolError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    return ("validation", "val", "valid", "dev") if split == "val" else (split,)


def check_ratios(ratios: Sequence[float]) -> None:
    """Raise a `DataPoolError` if ratios are not the fractions of train, val and test."""
    if len(ratios) != len(SPLITS) or min(ratios) < 0 or sum(ratios) > 1 + 1e-9:
        raise DataPoolError(
            f"split_ratios must be the fractions of {', '.join(SPLITS)}, each at least 0, together at most 1; "
            f"got {list(ratios)}"
        )


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """Selection of the rows of a split.

    Args:
        max_size: maximum number of samples per split.
        max_rows: read only this many rows of a file or table, from its beginning, before it is divided into splits.
        split_ratios: fractions of train, val and test if all splits come from one file or table.
        seed: seed of the shuffle before splitting.
    """

    max_size: Count | None = None
    max_rows: Count | None = None
    split_ratios: Sequence[float] = (0.8, 0.1, 0.1)
    seed: int = 0

    def is_left_out(self, split: str) -> bool:
        """Return True if the fraction of a split is 0."""
        check_ratios(self.split_ratios)
        return split in SPLITS and self.split_ratios[SPLITS.index(split)] == 0

    def of_all(self, n_rows: int, split: str) -> list[int]:
        """Return the row indices of a split; the splits are disjoint and cover all rows if the ratios add up to 1."""
        names_of(split)
        position = SPLITS.index(split)
        ratios = self.split_ratios
        check_ratios(ratios)

        # The order depends on the seed and the number of rows alone, so each split takes its slice of the same order.
        # Borders are rounded from cumulative ratios: rounding each split's size could lose a row or use one twice.
        order = np.random.default_rng(self.seed).permutation(n_rows)
        start = round(n_rows * sum(ratios[:position]))
        stop = round(n_rows * sum(ratios[: position + 1]))
        return order[start:stop].tolist()[: self.max_size]
