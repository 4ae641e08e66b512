"""Porter's stems (Porter, 1980) by NLTK. Each word's is found once: most words of a text stood in texts before it."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Literal

REMEMBERED = 2**16
"""Words whose stems are kept; about ten megabytes."""


class Stems:
    """What NLTK, rouge-score and others take as a stemmer.

    Args:
        mode: NLTK's extensions, or the algorithm as published.
    """

    def __init__(self, mode: Literal["NLTK_EXTENSIONS", "ORIGINAL_ALGORITHM"] = "NLTK_EXTENSIONS") -> None:
        from nltk.stem.porter import PorterStemmer

        self.stem = lru_cache(maxsize=REMEMBERED)(PorterStemmer(mode).stem)


@cache
def porter(mode: Literal["NLTK_EXTENSIONS", "ORIGINAL_ALGORITHM"] = "NLTK_EXTENSIONS") -> Stems:
    """The process's one stemmer of that mode."""
    return Stems(mode)
