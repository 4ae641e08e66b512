"""Porter's stems (Porter, 1980) by NLTK, cached by word because most words of a text occurred in earlier texts."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Literal

REMEMBERED = 2**16
"""Number of words whose stems are cached; about ten megabytes."""


class Stems:
    """Cached stemmer with the interface that NLTK, rouge-score and others expect.

    Args:
        mode: NLTK's extensions, or the algorithm as published.
    """

    def __init__(self, mode: Literal["NLTK_EXTENSIONS", "ORIGINAL_ALGORITHM"] = "NLTK_EXTENSIONS") -> None:
        from nltk.stem.porter import PorterStemmer

        self.stem = lru_cache(maxsize=REMEMBERED)(PorterStemmer(mode).stem)


@cache
def porter(mode: Literal["NLTK_EXTENSIONS", "ORIGINAL_ALGORITHM"] = "NLTK_EXTENSIONS") -> Stems:
    """Return the stemmer of that mode, which is shared by the whole process."""
    return Stems(mode)
