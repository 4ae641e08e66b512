"""BLEU-4 (Papineni et al., 2002) on whitespace tokens: all references, no smoothing.

As in Hugging Face's metric `bleu`, which RL4LMs used: the brevity penalty counts the shortest reference, and a text or
corpus without a common 4-gram scores 0. Nothing generated scores 0 too; there that metric failed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rl4lms_like.scoring.ngrams import ngrams
from rl4lms_like.scoring.references import readings

_ORDER = 4


@dataclass(frozen=True)
class BleuScores:
    """The score of each text alone, and of all together, from 0 to 1."""

    texts: list[float]
    corpus: float


def bleu(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> BleuScores:
    """BLEU of each text and of the corpus, whose counts are summed before they are divided.

    Args:
        generated_texts: `n` texts.
        references: for each at least one reference.
    """
    counts = [
        _counts(generated.split(), reference)
        for generated, reference in zip(generated_texts, readings(references, _Reference), strict=True)
    ]
    return BleuScores([_score(each) for each in counts], _score([sum(column) for column in zip(*counts, strict=True)]))


class _Reference:
    """What counts of a text's references: of each n-gram the most that one reference has, and the shortest length."""

    def __init__(self, texts: Sequence[str]) -> None:
        first, *others = tokens = [text.split() for text in texts]
        self.length = min(map(len, tokens))
        self.most = Counter(_grams(first))
        for other in others:
            for gram, count in Counter(_grams(other)).items():
                if count > self.most[gram]:
                    self.most[gram] = count


def _grams(tokens: list[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(ngrams(tokens, order) for order in range(1, _ORDER + 1))


def _counts(tokens: list[str], reference: _Reference) -> list[int]:
    """Length, shortest reference, and for each order the n-grams, then for each order those in a reference."""
    matches = [0] * _ORDER
    for gram, count in Counter(_grams(tokens)).items():
        most = reference.most.get(gram, 0)
        matches[len(gram) - 1] += count if count < most else most
    return [len(tokens), reference.length, *(max(len(tokens) - shorter, 0) for shorter in range(_ORDER)), *matches]


def _score(counts: Sequence[int]) -> float:
    length, reference_length, *by_order = counts
    totals, matches = by_order[:_ORDER], by_order[_ORDER:]
    if not all(matches):
        return 0.0
    log_precision = sum(math.log(matched / total) for matched, total in zip(matches, totals, strict=True)) / _ORDER
    brevity = 0.0 if length > reference_length else 1 - reference_length / length
    return math.exp(log_precision + brevity)
