"""Metrics of repetition and novelty: n-grams, frequent sentences, equal texts, lengths.

`distinct_n`    of lower-cased words and single punctuation marks, and of sentences
`diversity`     GEM-metrics' statistics of NLTK's words in lower case; names in `-nopunct` are without punctuation
`novelty`       of lower-cased words and single punctuation marks, compared with those of the training texts

    generated    the cat sat on my roof
    trained on   the cat sat | on my way       2-grams: 3 of 5 known (the cat, cat sat, on my), novelty 2/5

Sentences end in `.`, `!` or `?` and contain a letter or digit; differences in white space and case are ignored.
Entropies are in bits. A conditional entropy is that of an n-gram's last word given the others.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median

from rl4lms_like.metrics.base import MetricResults, ScoreMetric, TextsMetric
from rl4lms_like.scoring.bleu import ngrams
from rl4lms_like.scoring.nltk_data import require_data, words
from rl4lms_like.scoring.score import Texts, existing_file, json_texts
from rl4lms_like.system.numbers import Count
from rl4lms_like.system.regular_files import require_regular_file

_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
_LETTER_OR_DIGIT = re.compile(r"\w")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_ORDERS = (1, 2, 3)
_PUNCTUATION = frozenset(string.punctuation)
_Grams = Counter[tuple[str, ...]]


class DiversityMetrics(TextsMetric):
    """GEM-metrics' word statistics: type-token ratios, lengths, distinct n-grams, entropies.

    Args:
        window_size: window of the mean segmental type-token ratio `msttr-<window_size>`, in tokens.
    """

    def __init__(self, window_size: Count = 100) -> None:
        require_data("the metric 'diversity'", "punkt_tab")
        self.window_size = window_size

    def results(self, texts: Texts) -> MetricResults:
        """Compute `diversity_metrics/` + GEM-metrics' names."""
        statistics = diversity(texts.responses, self.window_size)
        return {f"diversity_metrics/{name}": (None, value) for name, value in statistics.items()}


class DistinctN(TextsMetric):
    """Distinct 1-grams and 2-grams, the most frequent sentence, unique texts.

    All four depend on the number and length of the texts, so compare splits of equal size. A text that is too short for
    a 2-gram counts as one, so that collapsed texts score low however short they are.
    """

    def results(self, texts: Texts) -> MetricResults:
        """Compute `diversity_metrics/` + `distinct-1`, `distinct-2`, `top_sentence_share`, `unique_texts`, 0 to 1."""
        responses = texts.responses
        return {
            "diversity_metrics/distinct-1": (None, distinct_n(responses, 1)),
            "diversity_metrics/distinct-2": (None, distinct_n(responses, 2)),
            "diversity_metrics/top_sentence_share": (None, top_sentence_fraction(responses)),
            "diversity_metrics/unique_texts": (None, len(set(responses)) / len(responses)),
        }


class Length(ScoreMetric):
    """Mean number of words per response."""

    keys = ("length/words",)

    def per_text(self, texts: Texts) -> list[float]:
        return [float(len(text.split())) for text in texts.responses]


def tokens(text: str) -> list[str]:
    """Return the lower-cased words and single punctuation marks of a text."""
    return _TOKEN.findall(text.lower())


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Return the number of distinct n-grams divided by the number of n-grams of all texts (Li et al., 2016).

    A text with fewer than `n` tokens counts as one n-gram made of its tokens. If such texts were left out, the ratio
    would depend only on the few texts that are long enough: it would be 1 for a single one of them.
    """
    grams: list[tuple[str, ...]] = []
    for text in texts:
        text_tokens = tokens(text)
        grams += list(ngrams(text_tokens, n)) or [tuple(text_tokens)]
    return len(set(grams)) / len(grams) if grams else 0.0


def top_sentence_fraction(texts: Sequence[str]) -> float:
    """Return the fraction of texts that contain the most frequent sentence.

    It is 1/n if no sentence occurs in two of the `n` texts, and 0 if no text has a sentence.
    """
    # The number of texts with a sentence, not of its occurrences: a text that repeats one sentence counts once.
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(set(_sentences(text)))
    return max(counts.values(), default=0) / len(texts)


def _sentences(text: str) -> list[str]:
    sentences = _SENTENCE_END.split(text)
    return [" ".join(sentence.lower().split()) for sentence in sentences if _LETTER_OR_DIGIT.search(sentence)]


def diversity(texts: Sequence[str], window_size: int = 100) -> dict[str, float]:
    """Return all statistics by GEM-metrics' names.

    `msttr-W` is the mean fraction of distinct tokens in windows of `W` tokens over the concatenated texts (Johnson,
    1944), rounded to 5 decimals and NaN with fewer than `W` tokens. `vocab_size-N` is the number of distinct n-grams,
    `distinct-N` that number divided by the number of n-grams, `unique-N` the number of n-grams that occur once; all are
    0 without n-grams.
    """
    # [n_texts][n_words] each, with punctuation marks and without.
    texts_with: list[list[str]] = []
    texts_without: list[list[str]] = []
    for text in texts:
        text_words = [word.lower() for word in words(text, "the metric 'diversity'")]
        texts_with.append(text_words)
        texts_without.append([word for word in text_words if word not in _PUNCTUATION])

    # GEM-metrics' names: `_nopunct` here, `-nopunct` in all others.
    results = {
        f"msttr-{window_size}": round(_msttr(texts_with, window_size), 5),
        f"msttr-{window_size}_nopunct": round(_msttr(texts_without, window_size), 5),
    }
    results |= _lengths(texts_with) | _of_ngrams(texts_with)
    for name, value in (_lengths(texts_without) | _of_ngrams(texts_without)).items():
        results[f"{name}-nopunct"] = value
    return results


def _msttr(texts: list[list[str]], window_size: int) -> float:
    """Return the mean segmental type-token ratio; the words after the last whole window are not used."""
    all_words = list(chain.from_iterable(texts))
    starts = range(0, len(all_words) - window_size + 1, window_size)
    ratios = [len(set(all_words[start : start + window_size])) / window_size for start in starts]
    return fmean(ratios) if ratios else math.nan


def _lengths(texts: list[list[str]]) -> dict[str, float]:
    lengths = [len(text) for text in texts]
    mean = fmean(lengths)
    return {
        "total_length": float(sum(lengths)),
        "mean_pred_length": mean,
        "std_pred_length": math.sqrt(fmean((length - mean) ** 2 for length in lengths)),
        "median_pred_length": float(median(lengths)),
        "min_pred_length": float(min(lengths)),
        "max_pred_length": float(max(lengths)),
    }


def _of_ngrams(texts: list[list[str]]) -> dict[str, float]:
    results: dict[str, float] = {}
    shorter: _Grams = Counter()
    for order in _ORDERS:
        counts: _Grams = Counter(chain.from_iterable(ngrams(text, order) for text in texts))
        results[f"distinct-{order}"] = len(counts) / counts.total() if counts else 0.0
        results[f"vocab_size-{order}"] = float(len(counts))
        results[f"unique-{order}"] = float(sum(count == 1 for count in counts.values()))
        results[f"entropy-{order}"] = _entropy(counts)

        # H(last word | words before it) needs the n-grams that are one word shorter.
        if order > 1:
            results[f"cond_entropy-{order}"] = _conditional_entropy(counts, shorter)
        shorter = counts
    return results


def _entropy(counts: _Grams) -> float:
    """Return `sum p(gram) log2(1 / p(gram))`, in bits."""
    total = counts.total()
    return math.fsum(count / total * math.log2(total / count) for count in counts.values())


def _conditional_entropy(counts: _Grams, shorter: _Grams) -> float:
    """Return `-sum p(gram) log2(p(gram) / p(gram without its last word))`, in bits."""
    total = counts.total()
    total_shorter = shorter.total()
    terms = []
    for gram, count in counts.items():
        p_gram = count / total
        p_shorter = shorter[gram[:-1]] / total_shorter
        terms.append(p_gram * math.log2(p_shorter / p_gram))
    return math.fsum(terms)


class NoveltyMetric(TextsMetric):
    """Fraction of n-grams, and of whole texts, that do not occur in a file of training texts.

    The file is read line by line; only the n-grams of the generated texts are kept in memory.

    Args:
        training_texts: the file, one text per line; `.jsonl`: one object per line. It is read at every evaluation.
        field: key of the text, or of a list of texts, in each object.
        max_n: n-grams of 1 to `max_n` tokens are counted.
    """

    def __init__(self, training_texts: str, field: str = "text", max_n: Count = 3) -> None:
        self.path = existing_file(training_texts, "training_texts")
        self.field = field
        self.max_n = max_n

    def results(self, texts: Texts) -> MetricResults:
        """Compute `diversity_metrics/novelty-N` of each text and over all n-grams, and `.../novel_texts`, 0 or 1.

        A text without n-grams of an order is NaN. A text is not novel if it equals a training text, ignoring case and
        white space.
        """
        responses = [tokens(text) for text in texts.responses]
        orders = range(1, self.max_n + 1)

        # n-grams of the responses: of each by order, and all of an order.
        grams: dict[int, list[list[tuple[str, ...]]]] = {}
        all_grams: dict[int, set[tuple[str, ...]]] = {}
        for order in orders:
            grams[order] = [list(ngrams(response, order)) for response in responses]
            all_grams[order] = set(chain.from_iterable(grams[order]))

        # Those that occur in the training texts, of which one at a time is in memory: the file may be larger than it.
        known: dict[int, set[tuple[str, ...]]] = {order: set() for order in orders}
        whole_responses = {tuple(response) for response in responses}
        copied: set[tuple[str, ...]] = set()
        for training_text in read_texts(self.path, self.field):
            training_tokens = tokens(training_text)
            if tuple(training_tokens) in whole_responses:
                copied.add(tuple(training_tokens))
            for order in orders:
                known[order] |= all_grams[order].intersection(ngrams(training_tokens, order))

        # Over all n-grams, so that a long response weighs more than a short one; not the mean of the responses' scores.
        results: MetricResults = {}
        for order in orders:
            scores = [_fraction_of_new(response_grams, known[order]) for response_grams in grams[order]]
            overall = _fraction_of_new(list(chain.from_iterable(grams[order])), known[order])
            results[f"diversity_metrics/novelty-{order}"] = (scores, overall)
        novel = [float(tuple(response) not in copied) for response in responses]
        return results | {"diversity_metrics/novel_texts": (novel, fmean(novel))}


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the texts of a file, one per line; of a `.jsonl` file, those of `field`."""
    require_regular_file(path)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if path.suffix != ".jsonl":
                yield line.rstrip("\n")
            elif line.strip():
                yield from json_texts(line, field, f"{path}, line {number}", bare=False)


def _fraction_of_new(grams: list[tuple[str, ...]], known: set[tuple[str, ...]]) -> float:
    return sum(gram not in known for gram in grams) / len(grams) if grams else math.nan
