"""Texts to compare with: which samples have some, and what is said and computed where they have none.

reward    a sample without references cannot be scored: an error that names it
metric    its score is NaN, and it counts in no mean and no corpus score
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")

_EXCERPT = 60


def require_references(prompt_texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Nothing, or an error that names the first sample without references.

    Raises:
        ValueError: there is such a sample.
    """
    for index, (prompt, texts) in enumerate(zip(prompt_texts, references, strict=True)):
        if not texts:
            excerpt = prompt if len(prompt) <= _EXCERPT else f"{prompt[: _EXCERPT - 3]}..."
            raise ValueError(
                f"text {index} of {len(references)} has no references to compare with (prompt {excerpt!r})"
            )


def with_references(references: Sequence[Sequence[str]]) -> list[int]:
    """Which samples have references."""
    return [index for index, texts in enumerate(references) if texts]


def readings(references: Sequence[Sequence[str]], read: Callable[[tuple[str, ...]], T]) -> Iterator[T]:
    """What `read` makes of each sample's references, made once for equal ones and kept no longer than needed.

    Args:
        references: of each sample.
        read: counts what a score needs of one sample's references.
    """
    left = Counter(map(tuple, references))
    kept: dict[tuple[str, ...], T] = {}
    for texts in map(tuple, references):
        reading = kept.pop(texts) if texts in kept else read(texts)
        left[texts] -= 1
        if left[texts]:
            kept[texts] = reading
        yield reading


def spread(scores: Sequence[float], indices: Sequence[int], n: int) -> list[float]:
    """`scores` at the places `indices` of `n`, NaN at the others."""
    placed = [math.nan] * n
    for index, score in zip(indices, scores, strict=True):
        placed[index] = score
    return placed


def mean(scores: Sequence[float]) -> float:
    """The mean, NaN of nothing."""
    return fmean(scores) if scores else math.nan
