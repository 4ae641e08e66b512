"""METEOR (Lavie and Agarwal, 2007) by NLTK, on NLTK's words, against the best reference.

    generated  | the quick  cats sat on a rug      matched by form, then by stem, then by WordNet's synonyms
    reference  | the fast   cat  sat on the mat

Stems and synonyms are cached by word, and each reference is tokenised once per call. The alignment and the score are
NLTK's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from types import SimpleNamespace

from rl4lms_like.scoring.nltk_data import CACHE_SIZE, porter, require_data, wordnet, words
from rl4lms_like.scoring.score import Score, Texts, readings


class Meteor(Score):
    """METEOR against the best reference, from 0 to 1."""

    id = "meteor"
    needs_references = True

    def __init__(self) -> None:
        require_data(self.needed_by, "punkt_tab", "wordnet")

    def per_text(self, texts: Texts) -> list[float]:
        return meteor(texts.responses, texts.references)


def meteor(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return METEOR of each text against its best reference, from 0 to 1, with alpha 0.9, beta 3 and gamma 0.5.

    A text that equals its reference scores a little below 1: the penalty for one chunk of `n` words is `0.5 / n**3`.
    An empty text scores 0. Each text has at least one reference.
    """
    from nltk.translate.meteor_score import meteor_score

    stemmer, synonyms = porter(), _synonyms()
    split = readings(references, lambda texts: [words(text) for text in texts])
    return [
        float(meteor_score(tokens, words(generated), stemmer=stemmer, wordnet=synonyms))
        for generated, tokens in zip(generated_texts, split, strict=True)
    ]


@cache
def _synonyms() -> SimpleNamespace:
    """Return a cached lookup of synonyms, with the part of the interface of NLTK's WordNet that METEOR uses."""
    reader = wordnet("METEOR")

    @lru_cache(maxsize=CACHE_SIZE)
    def synsets(word: str) -> list[SimpleNamespace]:
        names = {lemma.name() for synset in reader.synsets(word) for lemma in synset.lemmas()}
        lemmas = [SimpleNamespace(name=partial(str, name)) for name in sorted(names) if "_" not in name]
        return [SimpleNamespace(lemmas=lambda: lemmas)] if lemmas else []

    return SimpleNamespace(synsets=synsets)
