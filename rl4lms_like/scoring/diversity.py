"""Repetition within and between texts.

tokens      lower-cased words and single punctuation marks
sentences   end in `.`, `!` or `?` and contain a letter or digit; differences in white space and case are ignored
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
    """Return the lower-cased words and single punctuation marks of a text."""
    return _TOKEN.findall(text.lower())


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Return the number of distinct n-grams divided by the number of n-grams of all texts (Li et al., 2016).

    A text with fewer than `n` tokens counts as one n-gram made of its tokens. If such texts were left out, the ratio
    would depend only on the few texts that are long enough: it would be 1 for a single one of them.
    """
    grams = [gram for text in texts for gram in _ngrams_or_all(tokens(text), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def top_sentence_share(texts: Sequence[str]) -> float:
    """Return the fraction of texts that contain the most frequent sentence.

    It is 1/n if no sentence occurs in two of the `n` texts, and 0 if no text has a sentence.
    """
    counts = Counter(sentence for text in texts for sentence in set(_sentences(text)))
    return max(counts.values(), default=0) / len(texts)


def unique_share(texts: Sequence[str]) -> float:
    """Return the number of distinct texts divided by the number of texts."""
    return len(set(texts)) / len(texts)


def _ngrams_or_all(tokens: list[str], n: int) -> list[tuple[str, ...]]:
    return list(ngrams(tokens, n)) or [tuple(tokens)]


def _sentences(text: str) -> list[str]:
    parts = _SENTENCE_END.split(text)
    return [" ".join(part.lower().split()) for part in parts if _LETTER_OR_DIGIT.search(part)]
