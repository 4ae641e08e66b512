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
from typing import Any

from rl4lms_like.scoring.nltk_data import CACHE_SIZE, porter, require_sentences_and_wordnet, wordnet, words
from rl4lms_like.scoring.score import Score, Texts, readings

require_meteor = require_sentences_and_wordnet


class Meteor(Score):
    """METEOR against the best reference, from 0 to 1."""

    id = "meteor"
    needs_references = True

    def __init__(self) -> None:
        require_meteor(self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        return meteor(texts.responses, texts.references)


def meteor(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return METEOR of each text against its best reference, from 0 to 1, with alpha 0.9, beta 3 and gamma 0.5.

    A text that equals its reference scores a little below 1: the penalty for one chunk of `n` words is `0.5 / n**3`.
    An empty text scores 0.

    Args:
        generated_texts: `n` texts.
        references: at least one reference per text.
    """
    from nltk.translate.meteor_score import meteor_score

    stemmer, synonyms = porter(), _synonyms()
    split = readings(references, lambda texts: [words(text) for text in texts])
    return [
        float(meteor_score(tokens, words(generated), stemmer=stemmer, wordnet=synonyms))
        for generated, tokens in zip(generated_texts, split, strict=True)
    ]


class _Synonyms:
    """Cached lookup of synonyms, the part of NLTK's WordNet reader that METEOR calls."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.synsets = lru_cache(maxsize=CACHE_SIZE)(self._look_up)

    def _look_up(self, word: str) -> list[SimpleNamespace]:
        """Return all synonyms of a word, with the interface of NLTK's synsets and lemmas."""
        names = {lemma.name() for synset in self._reader.synsets(word) for lemma in synset.lemmas()}
        lemmas = [SimpleNamespace(name=partial(str, name)) for name in sorted(names) if "_" not in name]
        return [SimpleNamespace(lemmas=lambda: lemmas)] if lemmas else []


@cache
def _synonyms() -> _Synonyms:
    return _Synonyms(wordnet("METEOR"))
