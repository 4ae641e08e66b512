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

    # Lavie and Agarwal, section 2, with precision P and recall R of the matched words, and the number of chunks: runs
    # of matches that are adjacent and in the same order in both texts.
    #     F = P R / (alpha P + (1 - alpha) R)      METEOR = F (1 - gamma (n_chunks / n_matches)^beta)
    stemmer = porter()
    synonyms = _synonyms()
    reference_words = readings(references, lambda texts: [words(text) for text in texts])
    scores = []
    for generated, tokens in zip(generated_texts, reference_words, strict=True):
        scores.append(float(meteor_score(tokens, words(generated), stemmer=stemmer, wordnet=synonyms)))
    return scores


@cache
def _synonyms() -> SimpleNamespace:
    """Return a cached lookup of synonyms, with the part of the interface of NLTK's WordNet that METEOR uses."""
    reader = wordnet("METEOR")

    @lru_cache(maxsize=CACHE_SIZE)
    def synsets(word: str) -> list[SimpleNamespace]:
        names: set[str] = set()
        for synset in reader.synsets(word):
            names.update(lemma.name() for lemma in synset.lemmas())

        # METEOR takes the union over all synsets of a word, and leaves out names of several words, which have "_": one
        # synset with all lemmas means the same.
        lemmas = [SimpleNamespace(name=partial(str, name)) for name in sorted(names) if "_" not in name]
        return [SimpleNamespace(lemmas=lambda: lemmas)] if lemmas else []

    return SimpleNamespace(synsets=synsets)
