"""Sums of two numbers with their results, a task with verifiable answers that needs no download.

    prompt     3+14=
    reference  17

A question's split depends on the question alone, so a held-out question never occurs in training, whatever the limit of
the numbers.
"""

from __future__ import annotations

import random
import zlib
from typing import Annotated

from annotated_types import Interval

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import names_of

LIMIT = 50  # default limit of the numbers
_HELD_OUT_FRACTION = 10  # val and test each get one question in 10


class Sums(TextGenPool):
    """Questions such as `3+14=`, each with its result as the reference."""

    @classmethod
    def prepare(cls, split: str, limit: Annotated[int, Interval(ge=10, le=1000)] = LIMIT) -> Sums:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            limit: both numbers are whole numbers from 0 to below this.
        """
        asked = questions(split, limit)
        return cls([Sample(question, question, [str(result)]) for question, result in asked])


def questions(split: str, limit: int = LIMIT) -> list[tuple[str, int]]:
    """Return the questions of a split and their results, in a fixed random order; unknown splits: `DataPoolError`."""
    names_of(split)
    every = [(f"{a}+{b}=", a + b) for a in range(limit) for b in range(limit)]
    found = [(question, result) for question, result in every if split_of(question) == split]
    return random.Random(f"{split}-sums").sample(found, len(found))


def split_of(question: str) -> str:
    """Return the split of a question, which depends on its text only."""
    return {0: "val", 1: "test"}.get(zlib.crc32(question.encode()) % _HELD_OUT_FRACTION, "train")
