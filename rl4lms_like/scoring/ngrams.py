"""Runs of `n` tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def ngrams(tokens: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """All runs of `n` tokens, in order; none of fewer tokens."""
    return zip(*(tokens[start:] for start in range(n)), strict=False)
