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

LIMIT = 50
"""Default limit of the numbers: 2500 questions."""

_HELD_OUT_FRACTION = 10
"""`val` and `test` each get one question in 10."""


class Sums(TextGenPool):
    """Questions such as `3+14=`, each with its result as the reference."""

    @classmethod
    def prepare(cls, split: str, limit: Annotated[int, Interval(ge=10, le=1000)] = LIMIT) -> Sums:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            limit: both numbers are whole numbers from 0 to below this.
        """
        # A question is its own id: it occurs once.
        return cls([Sample(question, question, [str(result)]) for question, result in questions(split, limit)])


def questions(split: str, limit: int = LIMIT) -> list[tuple[str, int]]:
    """Return the questions of a split and their results, in a fixed random order; unknown splits: `DataPoolError`."""
    names_of(split)
    in_split: list[tuple[str, int]] = []
    for a in range(limit):
        for b in range(limit):
            question = f"{a}+{b}="
            if split_of(question) == split:
                in_split.append((question, a + b))

    # Shuffled, because an evaluation may use the first samples only, which would all begin with 0 or 1.
    return random.Random(f"{split}-sums").sample(in_split, len(in_split))


def split_of(question: str) -> str:
    """Return the split of a question, which depends on its text only."""
    # crc32 and not `hash`, which differs from process to process.
    bucket = zlib.crc32(question.encode()) % _HELD_OUT_FRACTION
    return {0: "val", 1: "test"}.get(bucket, "train")
