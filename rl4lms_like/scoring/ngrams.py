"""N-grams of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def ngrams(tokens: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """Return all n-grams in order; none for fewer than `n` tokens."""
    return zip(*(tokens[start:] for start in range(n)), strict=False)
