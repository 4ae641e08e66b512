"""CIDEr-D: n-gram overlap weighted by document frequency (Vedantam et al., 2015), on RL4LMs' tokens.

tokens     spaCy's English tokenizer, case kept, joined by spaces and split again
weight     count of an n-gram times log(documents / documents that contain it); a document is one text's references
score      10 x mean over n = 1..4 and over references of a clipped cosine, smaller if the lengths differ

The documents are the references of the batch, or those of a file. With those of the batch, a score depends on the other
texts of the batch, and a single text always gets 0: log(1 / 1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.scoring.bleu import ORDER, ngrams_to_4
from rl4lms_like.scoring.score import existing_file, json_texts

SIGMA = 6.0  # standard deviation of the Gaussian penalty for a difference in length, in bigrams
Ngram: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True)
class Frequencies:
    """Inverse document frequencies of n-grams."""

    weights: Mapping[Ngram, float]  # n-gram -> log(documents / documents that contain it)
    largest: float  # weight of an n-gram in one document, also used for an n-gram in none


def cider(
    generated_texts: Sequence[str], references: Sequence[Sequence[str]], frequencies: Frequencies | None = None
) -> list[float]:
    """Return CIDEr-D of each text, from 0 to 10; NaN for a text without references. Default: their own frequencies."""
    counted = {text: _counts(text) for texts in references for text in texts}
    known = frequencies or _frequencies([counted[text] for text in texts] for texts in references if texts)
    vectors = {text: _Vector(counts, known) for text, counts in counted.items()}
    scores = []
    for generated, texts in zip(generated_texts, references, strict=True):
        if not texts:
            scores.append(math.nan)
            continue
        vector = _Vector(_counts(generated), known)
        scores.append(10 * sum(_similarity(vector, vectors[text]) for text in texts) / len(texts))
    return scores


def frequencies_of_file(path: str) -> Frequencies:
    """Return the document frequencies of a file of references, read once per process unless it changes.

    Args:
        path: a `.jsonl` file has the references of one sample per line, as a text, a list of texts, or an object with
            `references`; any other file has one sample's only reference per line.

    Raises:
        ValueError: the file does not exist or has no references, or a line has another form.
    """
    file = existing_file(path, "references_file")
    return _frequencies_of_file(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=2**15)
def tokens(text: str) -> tuple[str, ...]:
    """Return spaCy's tokens of a text, without white space."""
    return tuple(" ".join(token.text for token in _tokenizer()(text)).split())


class _Vector:
    """A text's n-grams by order with their weights, the norm of each vector, and the number of bigrams."""

    def __init__(self, counts: Counter[Ngram], frequencies: Frequencies) -> None:
        self.weights: list[dict[Ngram, float]] = [{} for _ in range(ORDER)]
        self.n_bigrams = 0
        for ngram, count in counts.items():
            self.weights[len(ngram) - 1][ngram] = count * frequencies.weights.get(ngram, frequencies.largest)
            self.n_bigrams += count * (len(ngram) == 2)
        self.norms = [math.sqrt(sum(weight**2 for weight in weights.values())) for weights in self.weights]


def _similarity(text: _Vector, reference: _Vector) -> float:
    """Return the mean over the orders of the clipped cosine, times the penalty for a difference in length."""
    total = 0.0
    for mine, theirs, my_norm, their_norm in zip(
        text.weights, reference.weights, text.norms, reference.norms, strict=True
    ):
        if my_norm and their_norm:
            shared = mine.keys() & theirs.keys()
            product = math.fsum(min(mine[ngram], theirs[ngram]) * theirs[ngram] for ngram in shared)
            total += product / (my_norm * their_norm)
    return total / ORDER * math.exp(-((text.n_bigrams - reference.n_bigrams) ** 2) / (2 * SIGMA**2))


def _counts(text: str) -> Counter[Ngram]:
    return Counter(ngrams_to_4(tokens(text)))


@lru_cache(maxsize=4)
def _frequencies_of_file(file: Path, changed: int) -> Frequencies:
    documents = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                is_json, where = file.suffix == ".jsonl", f"{file}, line {number}"
                documents.append(json_texts(line, "references", where, bare=True) if is_json else [line.strip()])
    if not documents:
        raise ValueError(f"{file} has no references")
    return _frequencies([_counts(text) for text in texts] for texts in documents)


def _frequencies(documents: Iterable[Sequence[Counter[Ngram]]]) -> Frequencies:
    """Return the frequencies over documents; a document is the n-gram counts of one sample's references."""
    n_with: Counter[Ngram] = Counter()
    n_documents = 0
    for counts in documents:
        n_with.update(set().union(*counts))
        n_documents += 1
    largest = math.log(max(1, n_documents))
    return Frequencies({ngram: largest - math.log(count) for ngram, count in n_with.items()}, largest)


@cache
def _tokenizer() -> Any:
    import spacy

    return spacy.blank("en").tokenizer
