"""How much texts repeat themselves and each other.

tokens      lower-cased words and single punctuation marks
sentences   what ends in `.`, `!` or `?` and has a letter or digit; white space and case do not count
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rl4lms_like.scoring.ngrams import ngrams

_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_LETTER_OR_DIGIT = re.compile(r"\w")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def tokens(text: str) -> list[str]:
    """Lower-cased words and single punctuation marks."""
    return _TOKEN.findall(text.lower())


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Number of different n-grams over the number of all n-grams of all texts (Li et al., 2016).

    A text with fewer than `n` tokens counts as one n-gram, made of the tokens that it has. If it were left out, the
    ratio would be that of the few texts that are long enough: 1 if a single one is, whatever the others repeat.
    """
    grams = [gram for text in texts for gram in _ngrams_or_all(tokens(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def top_sentence_share(texts: Sequence[str]) -> float:
    """Fraction of the texts that contain the most frequent sentence; 1/n where no two of `n` texts share one.

    0 if no text has a sentence. Punctuation alone is no sentence.
    """
    counts = Counter(sentence for text in texts for sentence in set(_sentences(text)))
    return max(counts.values(), default=0) / len(texts)


def unique_share(texts: Sequence[str]) -> float:
    """Different texts over texts."""
    return len(set(texts)) / len(texts)


def _ngrams_or_all(tokens: list[str], n: int) -> list[tuple[str, ...]]:
    return list(ngrams(tokens, n)) or [tuple(tokens)]


def _sentences(text: str) -> list[str]:
    parts = _SENTENCE_END.split(text)
    return [" ".join(part.lower().split()) for part in parts if _LETTER_OR_DIGIT.search(part)]
