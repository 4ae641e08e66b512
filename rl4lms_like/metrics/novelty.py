"""Metric of novelty: fraction of the generated n-grams and texts that do not occur in the training texts.

    generated    the cat sat on my roof
    trained on   the cat sat | on my way       2-grams: 3 of 5 known (the cat, cat sat, on my), novelty 2/5

Tokens are lower-cased words and punctuation marks. The training texts are read once, line by line; only the n-grams of
the generated texts are kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import fmean

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import MissingResourceError
from rl4lms_like.core.numbers import Count
from rl4lms_like.metrics.base import MetricResults, TextsMetric
from rl4lms_like.metrics.diversity import tokens
from rl4lms_like.scoring.bleu import ngrams
from rl4lms_like.scoring.score import Texts, json_texts


class NoveltyMetric(TextsMetric):
    """Fraction of n-grams, and of whole texts, that do not occur in a file of training texts.

    Args:
        training_texts: the file, one text per line; `.jsonl`: one object per line. It is read at every evaluation.
        field: key of the text, or of a list of texts, in each object.
        max_n: n-grams of 1 to `max_n` tokens are counted.
    """

    def __init__(self, training_texts: str, field: str = "text", max_n: Count = 3) -> None:
        self.path = with_home(training_texts)
        self.field = field
        self.max_n = max_n
        if not self.path.is_file():
            raise MissingResourceError(
                f"the file of training texts {training_texts!r}",
                needed_by="the metric 'novelty'",
                command="set `training_texts` to an existing file with one text per line",
                offline="the same",
            )

    def results(self, texts: Texts) -> MetricResults:
        """Compute `diversity_metrics/novelty-N` of each text and over all n-grams, and `.../novel_texts`, 0 or 1.

        A text without n-grams of an order is NaN. A text is not novel if it equals a training text, ignoring case and
        white space.
        """
        read = [tokens(text) for text in texts.responses]
        grams = {order: [list(ngrams(text, order)) for text in read] for order in range(1, self.max_n + 1)}
        wanted = {order: set(chain.from_iterable(each)) for order, each in grams.items()}
        known: dict[int, set[tuple[str, ...]]] = {order: set() for order in grams}
        whole, copied = {tuple(text) for text in read}, set()
        for training_text in read_texts(self.path, self.field):
            its_tokens = tokens(training_text)
            if tuple(its_tokens) in whole:
                copied.add(tuple(its_tokens))
            for order, found in known.items():
                found.update(wanted[order].intersection(ngrams(its_tokens, order)))
        results: MetricResults = {
            f"diversity_metrics/novelty-{order}": (
                [_fraction_of_new(text, known[order]) for text in each],
                _fraction_of_new(list(chain.from_iterable(each)), known[order]),
            )
            for order, each in grams.items()
        }
        novel = [float(tuple(text) not in copied) for text in read]
        return results | {"diversity_metrics/novel_texts": (novel, fmean(novel))}


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the texts of a file, one per line; of a `.jsonl` file, those of `field`."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if path.suffix != ".jsonl":
                yield line.rstrip("\n")
            elif line.strip():
                yield from json_texts(line, field, f"{path}, line {number}", bare=False)


def _fraction_of_new(grams: list[tuple[str, ...]], known: set[tuple[str, ...]]) -> float:
    return sum(gram not in known for gram in grams) / len(grams) if grams else math.nan
