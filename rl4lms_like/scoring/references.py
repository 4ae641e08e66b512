"""References of samples, and the treatment of samples without references.

reward    the sample cannot be scored: an error that names it
metric    its score is NaN, and it is excluded from means and corpus scores
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
    """Raise an error that names the first sample without references.

    Raises:
        ValueError: a sample has no references.
    """
    for index, (prompt, texts) in enumerate(zip(prompt_texts, references, strict=True)):
        if not texts:
            excerpt = prompt if len(prompt) <= _EXCERPT else f"{prompt[: _EXCERPT - 3]}..."
            raise ValueError(
                f"text {index} of {len(references)} has no references to compare with (prompt {excerpt!r})"
            )


def with_references(references: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of the samples that have references."""
    return [index for index, texts in enumerate(references) if texts]


def readings(references: Sequence[Sequence[str]], read: Callable[[tuple[str, ...]], T]) -> Iterator[T]:
    """Yield `read(references)` for each sample, computed once for equal references and kept only while needed.

    Args:
        references: references of each sample.
        read: computes what a score needs from one sample's references.
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
    """Return `n` values: `scores` at the positions `indices`, NaN at the others."""
    placed = [math.nan] * n
    for index, score in zip(indices, scores, strict=True):
        placed[index] = score
    return placed


def mean(scores: Sequence[float]) -> float:
    """Return the mean, or NaN for no scores."""
    return fmean(scores) if scores else math.nan
