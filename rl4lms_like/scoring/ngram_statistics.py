"""Word statistics over all texts of a split, as defined by GEM-metrics, on NLTK's words in lower case.

    texts -> tokens            -> lengths, n-grams           names without suffix
          -> without punctuation -> lengths, n-grams         names that end in `-nopunct`

Entropies are in bits. A conditional entropy is that of an n-gram's last word given the others.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median

from rl4lms_like.scoring.ngrams import ngrams
from rl4lms_like.scoring.nltk_data import words

_ORDERS = (1, 2, 3)
_PUNCTUATION = frozenset(string.punctuation)
_Grams = Counter[tuple[str, ...]]


def diversity(texts: Sequence[str], window_size: int = 100) -> dict[str, float]:
    """Return all statistics by GEM-metrics' names.

    `msttr-W` is the mean fraction of distinct tokens in windows of `W` tokens over the concatenated texts (Johnson,
    1944), rounded to 5 decimals and NaN with fewer than `W` tokens. `vocab_size-N` is the number of distinct n-grams,
    `distinct-N` that number divided by the number of n-grams, `unique-N` the number of n-grams that occur once; all are
    0 without n-grams.

    Args:
        texts: at least one.
        window_size: window of the mean segmental type-token ratio, in tokens.

    Raises:
        MissingExtraError: NLTK is not installed.
        MissingResourceError: `punkt_tab` is not installed.
    """
    tokens = [[token.lower() for token in words(text, "the metric 'diversity'")] for text in texts]
    plain = [[token for token in text if token not in _PUNCTUATION] for text in tokens]
    results = {
        f"msttr-{window_size}": round(_msttr(tokens, window_size), 5),
        f"msttr-{window_size}_nopunct": round(_msttr(plain, window_size), 5),
    }
    for suffix, kind in (("", tokens), ("-nopunct", plain)):
        results |= {f"{name}{suffix}": value for name, value in (_lengths(kind) | _of_ngrams(kind)).items()}
    return results


def _msttr(texts: list[list[str]], window_size: int) -> float:
    tokens = list(chain.from_iterable(texts))
    starts = range(0, len(tokens) - window_size + 1, window_size)
    shares = [len(set(tokens[start : start + window_size])) / window_size for start in starts]
    return fmean(shares) if shares else math.nan


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
        if order > 1:
            results[f"cond_entropy-{order}"] = _conditional_entropy(counts, shorter)
        shorter = counts
    return results


def _entropy(counts: _Grams) -> float:
    total = counts.total()
    return math.fsum(count / total * math.log2(total / count) for count in counts.values())


def _conditional_entropy(counts: _Grams, shorter: _Grams) -> float:
    """Return `-sum p(gram) log2(p(gram) / p(gram without its last word))`."""
    total, total_shorter = counts.total(), shorter.total()
    return math.fsum(
        count / total * math.log2((shorter[gram[:-1]] / total_shorter) / (count / total))
        for gram, count in counts.items()
    )
