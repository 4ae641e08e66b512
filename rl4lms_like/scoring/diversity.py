"""How much texts repeat themselves and each other.

tokens      lower-cased words and single punctuation marks
sentences   what ends in `.`, `!` or `?`, spaces and case aside
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rl4lms_like.scoring.ngrams import ngrams

_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def tokens(text: str) -> list[str]:
    """Lower-cased words and single punctuation marks."""
    return _TOKEN.findall(text.lower())


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Different n-grams over all n-grams of all texts (Li et al., 2016); 0 if no text has `n` tokens."""
    grams = [gram for text in texts for gram in ngrams(tokens(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def top_sentence_share(texts: Sequence[str]) -> float:
    """The share of texts that have the most frequent sentence in them; 1/n where no two texts share one."""
    counts = Counter(sentence for text in texts for sentence in set(_sentences(text)))
    return max(counts.values(), default=0) / len(texts)


def unique_share(texts: Sequence[str]) -> float:
    """Different texts over texts."""
    return len(set(texts)) / len(texts)


def _sentences(text: str) -> list[str]:
    return [" ".join(part.lower().split()) for part in _SENTENCE_END.split(text) if part.strip()]
