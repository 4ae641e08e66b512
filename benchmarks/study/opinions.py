"""A second scorer of film sentences: logistic regression on the words of labelled reviews.

    STUDY_DATA=FOLDER python -m benchmarks.study.opinions      # how often is it right, for texts it has not read?

The reward of the film task, VADER, adds up a fixed list of words. A policy could learn to please that list alone. This
classifier has learned from people's labels of other reviews what praise looks like, and no policy sees its scores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.study.tasks import N_WORDS as N_PROMPT_WORDS
from benchmarks.study.tasks import FilmSentences, reviews

N_TERMS = 10_000
"""Words and pairs of words that count, the most frequent ones."""
N_STEPS, LEARNING_RATE, PENALTY = 150, 0.1, 1e-4


class OpinionClassifier:
    """Probability that a text praises a film, by its words and pairs of words.

    Args:
        texts: of reviews.
        labels: 1 for praise, 0 for blame.
    """

    def __init__(self, texts: Sequence[str], labels: Sequence[int]) -> None:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(set(_terms(text)))
        self._columns = {term: i for i, (term, _) in enumerate(counts.most_common(N_TERMS))}

        # Most entries are 0: a row has only as many terms as its review.
        rows = self._rows(texts)
        targets = torch.tensor(labels, dtype=torch.float32)
        self._weights = torch.zeros(len(self._columns), 1, requires_grad=True)
        self._bias = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.Adam([self._weights, self._bias], lr=LEARNING_RATE)
        for _ in range(N_STEPS):
            logits = torch.sparse.mm(rows, self._weights).squeeze(1) + self._bias
            loss = functional.binary_cross_entropy_with_logits(logits, targets) + PENALTY * self._weights.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> list[float]:
        """Return the probability of praise of each text."""
        logits = torch.sparse.mm(self._rows(texts), self._weights).squeeze(1) + self._bias
        return torch.sigmoid(logits).tolist()

    def _rows(self, texts: Sequence[str]) -> Tensor:
        """Return a sparse matrix `[texts, terms]`: 1 / sqrt(n) for each of the n known terms of a text."""
        places: list[tuple[int, int]] = []
        values: list[float] = []
        for row, text in enumerate(texts):
            known = {self._columns[term] for term in _terms(text) if term in self._columns}
            places += [(row, column) for column in sorted(known)]
            values += [max(len(known), 1) ** -0.5] * len(known)
        indices = torch.tensor(places, dtype=torch.long).reshape(-1, 2).T
        return torch.sparse_coo_tensor(indices, torch.tensor(values), (len(texts), len(self._columns))).coalesce()


def _terms(text: str) -> list[str]:
    """Return the words of a text, in lower case, and the pairs of neighbours."""
    words = re.findall(r"[a-z']+", text.replace("<br />", " ").lower())
    return words + [f"{first} {second}" for first, second in pairwise(words)]


@cache
def trained_classifier() -> OpinionClassifier:
    """Return the classifier of single sentences, without those of the prompts, and of every fourth long review."""
    rows, _ = divided_rows()
    return OpinionClassifier([row["text"] for row in rows], [int(row["label"]) for row in rows])


def divided_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows that the classifier learns from, and the others, which include all sentences with a prompt."""
    prompts: set[str] = set()
    for split in ("train", "val", "test"):
        prompts |= {sample.prompt_or_input_text for sample, _ in FilmSentences.prepare(split)}

    learned: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    for i, row in enumerate(reviews()):
        is_prompt = " ".join(row["text"].split()[:N_PROMPT_WORDS]) in prompts
        is_learned = i % 4 == 0 if row["source"] == "imdb" else not is_prompt
        (learned if is_learned else others).append(row)
    return learned, others


def main() -> None:
    """Print the accuracy on texts that it has not read, by their source."""
    classifier = trained_classifier()
    _, others = divided_rows()
    for source in ("rotten_tomatoes", "imdb"):
        rows = [row for row in others if row["source"] == source]
        scores = classifier([row["text"] for row in rows])
        n_right = sum((score > 0.5) == (row["label"] == "1") for score, row in zip(scores, rows, strict=True))
        print(f"{source}: {n_right / len(rows):.3f} of {len(rows):,} texts")


if __name__ == "__main__":
    main()
