"""CIDEr-D: n-grams in common, rare ones worth more (Vedantam et al., 2015), by RL4LMs' tokens.

tokens     spaCy's English tokenizer, case kept, joined by spaces and split again
weight     count of an n-gram times log(documents / documents that have it); a document is the references of one text
score      10 x mean over n = 1..4 and over references of a clipped cosine, smaller where the lengths differ

The documents are the batch's own references, or those of a file. With the batch's own, a score depends on what else
is scored with it, and one text alone always gets 0: log(1 / 1).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import import_extra

NEEDS = "extra 'captions'"
MAX_ORDER = 4
SIGMA = 6.0
"""Spread of the penalty for a difference in length, in bigrams."""

Ngram: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True)
class Frequencies:
    """What n-grams weigh by the documents that have them.

    Args:
        weights: log of all documents over those that have the n-gram.
        largest: that of an n-gram in one document; also of one in none.
    """

    weights: Mapping[Ngram, float]
    largest: float


def cider(
    generated_texts: Sequence[str], references: Sequence[Sequence[str]], frequencies: Frequencies | None = None
) -> list[float]:
    """CIDEr-D of each text, from 0 to 10; NaN for one without references.

    Args:
        generated_texts: `n` texts.
        references: `n` lists.
        frequencies: of n-grams; None: those of `references`.
    """
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
    """Those of a file of references, read once a process unless it changes.

    Args:
        path: `.jsonl`: a line is the references of one sample, as text, as a list of texts, or as an object that has
            them as `references`; any other file: a line is one sample's only reference.

    Raises:
        ValueError: there is no such file, a line has another form, or nothing is in it.
    """
    file = existing_file(path)
    return _frequencies_of_file(file, file.stat().st_mtime_ns)


def existing_file(path: str) -> Path:
    """The file of references.

    Raises:
        ValueError: there is none.
    """
    file = with_home(path)
    if not file.is_file():
        raise ValueError(f"references_file: there is no file {file.absolute()}")
    return file


def require_cider(needed_by: str) -> None:
    """Nothing, or an error where the tokenizer is missing: for constructors of components.

    Raises:
        MissingExtraError: spaCy is not installed.
    """
    import_extra("spacy", extra="captions", needed_by=needed_by)


@lru_cache(maxsize=2**15)
def tokens(text: str) -> tuple[str, ...]:
    """The tokens of a text by spaCy, without white space."""
    return tuple(" ".join(token.text for token in _tokenizer()(text)).split())


class _Vector:
    """A text's n-grams by order with their weights, the length of each vector, and the text's number of bigrams."""

    def __init__(self, counts: Counter[Ngram], frequencies: Frequencies) -> None:
        self.weights: list[dict[Ngram, float]] = [{} for _ in range(MAX_ORDER)]
        self.n_bigrams = 0
        for ngram, count in counts.items():
            self.weights[len(ngram) - 1][ngram] = count * frequencies.weights.get(ngram, frequencies.largest)
            self.n_bigrams += count * (len(ngram) == 2)
        self.norms = [math.sqrt(sum(weight**2 for weight in weights.values())) for weights in self.weights]


def _similarity(text: _Vector, reference: _Vector) -> float:
    """Mean over the orders of the clipped cosine, times the penalty for a difference in length."""
    total = 0.0
    for mine, theirs, my_norm, their_norm in zip(
        text.weights, reference.weights, text.norms, reference.norms, strict=True
    ):
        if my_norm and their_norm:
            shared = mine.keys() & theirs.keys()
            product = math.fsum(min(mine[ngram], theirs[ngram]) * theirs[ngram] for ngram in shared)
            total += product / (my_norm * their_norm)
    return total / MAX_ORDER * math.exp(-((text.n_bigrams - reference.n_bigrams) ** 2) / (2 * SIGMA**2))


def _counts(text: str) -> Counter[Ngram]:
    words = tokens(text)
    return Counter(
        words[start : start + order] for order in range(1, MAX_ORDER + 1) for start in range(len(words) - order + 1)
    )


@lru_cache(maxsize=4)
def _frequencies_of_file(file: Path, changed: int) -> Frequencies:
    documents = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                documents.append(_document(line, file, number) if file.suffix == ".jsonl" else [line.strip()])
    if not documents:
        raise ValueError(f"{file} has no references")
    return _frequencies([_counts(text) for text in texts] for texts in documents)


def _frequencies(documents: Iterable[Sequence[Counter[Ngram]]]) -> Frequencies:
    """By documents, each the n-grams of one sample's references."""
    n_with: Counter[Ngram] = Counter()
    n_documents = 0
    for counts in documents:
        n_with.update(set().union(*counts))
        n_documents += 1
    largest = math.log(max(1, n_documents))
    return Frequencies({ngram: largest - math.log(count) for ngram, count in n_with.items()}, largest)


def _document(line: str, file: Path, number: int) -> list[str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {number}: not JSON: {error}") from error
    found = row.get("references") if isinstance(row, dict) else row
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{file}, line {number}: expected text, a list of texts, or an object with 'references'")
    return texts


@cache
def _tokenizer() -> Any:
    import spacy

    return spacy.blank("en").tokenizer
