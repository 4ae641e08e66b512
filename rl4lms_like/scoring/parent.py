"""PARENT: overlap of a text with its references and with its table (Dhingra et al., 2019), as in ToTTo's script.

precision   over the text's n-grams: 1 if in the reference, else the fraction of their tokens that are in the table
recall      over the reference's n-grams, each weighted by that fraction: 1 if in the text
            and over the highlighted cells: the fraction of each that occurs in the text in order
F           of both, for the reference where it is best
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

from rl4lms_like.scoring.bleu import ORDER, ngrams
from rl4lms_like.scoring.rouge import lcs_length
from rl4lms_like.scoring.totto import TottoSample, totto_line

SMOOTHING = 1e-5  # replacement for a precision or recall of 0 above unigrams, and for a recall of 0


class Parent(NamedTuple):
    """Scores of one text, each from 0 to 1."""

    precision: float
    recall: float
    f_score: float


def parent(generated_texts: Sequence[str], samples: Sequence[TottoSample]) -> list[Parent]:
    """Return the scores of each text against its sample; NaN for a sample without references.

    Lambda, the weight of the table in the recall, is the fraction of the highlighted cells that the reference does not
    mention. Values without tokens are left out; a sample without values has no table recall. An empty text is read as
    `<null>`, as in the script.
    """
    tables: dict[int, _Table] = {}
    scores = []
    for text, sample in zip(generated_texts, samples, strict=True):
        if not sample.n_written:
            scores.append(Parent(math.nan, math.nan, math.nan))
            continue
        if id(sample) not in tables:
            tables[id(sample)] = _Table(sample)
        scores.append(tables[id(sample)].score(_tokens(totto_line(text))))
    return scores


class _Side:
    """N-grams of a text by order: their counts, and the fraction of their tokens that are in the table."""

    def __init__(self, tokens: Sequence[str], values: Collection[str]) -> None:
        known = [token in values for token in tokens]
        self.tokens = tokens
        self.counts: list[Counter[tuple[str, ...]]] = []
        self.weights: list[dict[tuple[str, ...], float]] = []
        for order in range(1, ORDER + 1):
            found = list(ngrams(tokens, order))
            shares = [sum(each) / order for each in ngrams(known, order)]
            self.counts.append(Counter(found))
            self.weights.append(dict(zip(found, shares, strict=True)))


class _Table:
    """Sample that is tokenised once for all texts that are compared with it."""

    def __init__(self, sample: TottoSample) -> None:
        # Two spaces keep the entries apart for the tokenizer, which looks at neighbouring characters.
        self.values = frozenset(_tokens("  ".join(sample.precision_entries)))
        self.entries = [tokens for entry in sample.recall_entries if (tokens := _tokens(entry))]
        references = [_tokens(reference) for reference in dict.fromkeys(sample.references)]
        self.references = [(_Side(tokens, self.values), 1.0 - self._mentioned(tokens)) for tokens in references]

    def score(self, tokens: list[str]) -> Parent:
        text = _Side(tokens, self.values)
        mentioned = self._mentioned(tokens)
        scores = []
        for reference, table_weight in self.references:
            precision = _precision(text, reference)
            recall = _recall(text, reference) ** (1 - table_weight) * (mentioned or SMOOTHING) ** table_weight
            scores.append(Parent(precision, recall, 2 * precision * recall / (precision + recall + 1e-8)))
        return max(scores, key=lambda score: score.f_score)

    def _mentioned(self, tokens: Sequence[str]) -> float:
        """Return the mean fraction of an entry that the text contains in order; 1 without entries."""
        if not self.entries:
            return 1.0
        return sum(lcs_length(entry, tokens) / len(entry) for entry in self.entries) / len(self.entries)


def _precision(text: _Side, reference: _Side) -> float:
    by_order = []
    for counts, weights, expected in zip(text.counts, text.weights, reference.counts, strict=True):
        found = 0.0
        for ngram, count in counts.items():
            in_reference = min(count, expected.get(ngram, 0))
            found += in_reference + (count - in_reference) * weights[ngram]
        by_order.append(found / counts.total() if counts else 0.0)
    return _geometric_mean(by_order, otherwise=0.0)


def _recall(text: _Side, reference: _Side) -> float:
    by_order = []
    for counts, weights, written in zip(reference.counts, reference.weights, text.counts, strict=True):
        wanted = sum(count * weights[ngram] for ngram, count in counts.items())
        found = sum(min(count, written.get(ngram, 0)) * weights[ngram] for ngram, count in counts.items())
        by_order.append(found / wanted if wanted else 1.0)
    return _geometric_mean(by_order, otherwise=SMOOTHING)


def _geometric_mean(by_order: Sequence[float], *, otherwise: float) -> float:
    """Return the mean with orders above the first smoothed; `otherwise` if the first is 0."""
    if not by_order[0]:
        return otherwise
    return math.exp(sum(math.log(value or SMOOTHING) for value in by_order) / len(by_order))


def _tokens(line: str) -> list[str]:
    return _tokenizer()(line.strip()).split()


@cache
def _tokenizer() -> Any:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return Tokenizer13a()
