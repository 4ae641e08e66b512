"""BLEU-4 (Papineni et al., 2002) on whitespace tokens, with all references and no smoothing.

As in Hugging Face's metric `bleu`, which RL4LMs used, the brevity penalty uses the shortest reference, and a text or
corpus without a common 4-gram scores 0. An empty text or corpus also scores 0, where that metric failed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

from rl4lms_like.scoring.score import Score, Texts, readings

T = TypeVar("T")
ORDER = 4  # number of tokens of the longest n-grams


class Bleu(Score):
    """BLEU-4 of each text alone, and of the corpus from the summed counts, from 0 to 1."""

    needs_references = True

    def per_text(self, texts: Texts) -> list[float]:
        return self.with_overall(texts)[0]

    def with_overall(self, texts: Texts) -> tuple[list[float], float]:
        read = readings(texts.references, _read)
        counts = [_counts(text.split(), *reference) for text, reference in zip(texts.responses, read, strict=True)]
        return [_score(each) for each in counts], _score([sum(column) for column in zip(*counts, strict=True)])


def ngrams(tokens: Sequence[T], n: int) -> Iterator[tuple[T, ...]]:
    """Return all n-grams in order; none for fewer than `n` tokens."""
    return zip(*(tokens[start:] for start in range(n)), strict=False)


def ngrams_to_4(tokens: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return the n-grams for n = 1 to 4, by n."""
    return chain.from_iterable(ngrams(tokens, order) for order in range(1, ORDER + 1))


def _read(references: Sequence[str]) -> tuple[int, Counter[tuple[str, ...]]]:
    """Return the length of the shortest reference, and the maximum count of each n-gram in one of them."""
    split = [text.split() for text in references]
    most = Counter(ngrams_to_4(split[0]))
    for tokens in split[1:]:
        most |= Counter(ngrams_to_4(tokens))
    return min(map(len, split)), most


def _counts(tokens: list[str], shortest: int, most: Counter[tuple[str, ...]]) -> list[int]:
    """Return the length, that of the shortest reference, and for each order the n-grams, then those in a reference."""
    matches = [0] * ORDER
    for gram, count in Counter(ngrams_to_4(tokens)).items():
        if gram in most:
            matches[len(gram) - 1] += min(count, most[gram])
    return [len(tokens), shortest, *(max(len(tokens) - shorter, 0) for shorter in range(ORDER)), *matches]


def _score(counts: Sequence[int]) -> float:
    length, reference_length, *by_order = counts
    totals, matches = by_order[:ORDER], by_order[ORDER:]
    if not all(matches):
        return 0.0
    log_precision = sum(math.log(matched / total) for matched, total in zip(matches, totals, strict=True)) / ORDER
    brevity = 0.0 if length > reference_length else 1 - reference_length / length
    return math.exp(log_precision + brevity)
