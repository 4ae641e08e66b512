"""How much texts repeat themselves and each other.

tokens      lower-cased words and single punctuation marks
sentences   what ends in `.`, `!` or `?`, spaces and case aside
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Different n-grams over all n-grams of all texts (Li et al., 2016); 0 if no text has `n` tokens."""
    ngrams = [gram for text in texts for gram in _ngrams(_TOKEN.findall(text.lower()), n)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def top_sentence_share(texts: Sequence[str]) -> float:
    """The share of texts that have the most frequent sentence in them; 1/n where no two texts share one."""
    counts = Counter(sentence for text in texts for sentence in set(_sentences(text)))
    return max(counts.values(), default=0) / len(texts)


def unique_share(texts: Sequence[str]) -> float:
    """Different texts over texts."""
    return len(set(texts)) / len(texts)


def _ngrams(tokens: list[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def _sentences(text: str) -> list[str]:
    return [" ".join(part.lower().split()) for part in _SENTENCE_END.split(text) if part.strip()]
