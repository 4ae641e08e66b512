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
        read_references = readings(texts.references, _read)
        counts = []
        for response, (shortest, most) in zip(texts.responses, read_references, strict=True):
            counts.append(_counts(response.split(), shortest, most))

        # Papineni et al., section 2.1.1: BLEU of a corpus is that of the summed counts, not the mean over texts.
        corpus_counts = [sum(column) for column in zip(*counts, strict=True)]
        return [_score(text_counts) for text_counts in counts], _score(corpus_counts)


def ngrams(tokens: Sequence[T], n: int) -> Iterator[tuple[T, ...]]:
    """Return all n-grams in order; none for fewer than `n` tokens."""
    return zip(*(tokens[start:] for start in range(n)), strict=False)


def ngrams_to_4(tokens: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return the n-grams for n = 1 to 4, by n."""
    return chain.from_iterable(ngrams(tokens, order) for order in range(1, ORDER + 1))


def _read(references: Sequence[str]) -> tuple[int, Counter[tuple[str, ...]]]:
    """Return the length of the shortest reference, and the maximum count of each n-gram in one of them."""
    tokens_of_references = [text.split() for text in references]

    # Max_Ref_Count (section 2.1): `|` of two counters takes the larger count of each n-gram.
    most = Counter(ngrams_to_4(tokens_of_references[0]))
    for tokens in tokens_of_references[1:]:
        most |= Counter(ngrams_to_4(tokens))
    return min(map(len, tokens_of_references)), most


def _counts(tokens: list[str], shortest: int, most: Counter[tuple[str, ...]]) -> list[int]:
    """Return the length, that of the shortest reference, and for each order the n-grams, then those in a reference."""
    # Count_clip = min(Count, Max_Ref_Count) (section 2.1): "the the the" does not match one "the" three times.
    matches = [0] * ORDER
    for gram, count in Counter(ngrams_to_4(tokens)).items():
        if gram in most:
            matches[len(gram) - 1] += min(count, most[gram])

    # A text of c tokens has c - n + 1 n-grams.
    totals = [max(len(tokens) - order + 1, 0) for order in range(1, ORDER + 1)]
    return [len(tokens), shortest, *totals, *matches]


def _score(counts: Sequence[int]) -> float:
    length, reference_length, *by_order = counts
    totals = by_order[:ORDER]
    matches = by_order[ORDER:]
    # log 0: without a match of one order, the geometric mean of the precisions is 0.
    if not all(matches):
        return 0.0

    # BLEU = BP exp(sum_n 1/4 log p_n), with BP = 1 if c > r, else exp(1 - r/c) (section 2.3).
    log_precision = sum(math.log(matched / total) for matched, total in zip(matches, totals, strict=True)) / ORDER
    log_brevity = 0.0 if length > reference_length else 1 - reference_length / length
    return math.exp(log_precision + log_brevity)
