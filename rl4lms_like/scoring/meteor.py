"""METEOR (Lavie and Agarwal, 2007) by NLTK, on NLTK's words, of the best reference.

    generated  | the quick  cats sat on a rug      matched by form, then by stem, then by WordNet's synonyms
    reference  | the fast   cat  sat on the mat

Every stem and every word's synonyms are looked up once and remembered, a reference's words are found once a call. The
alignment and the score are NLTK's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from rl4lms_like.scoring.nltk_data import require_sentences_and_wordnet, wordnet, words
from rl4lms_like.scoring.references import readings
from rl4lms_like.scoring.stems import REMEMBERED, porter


def require_meteor(needed_by: str) -> None:
    """Nothing, or an error if a part of METEOR is not installed.

    Raises:
        MissingExtraError: NLTK is not installed.
        MissingResourceError: `punkt_tab`, WordNet or both are not there.
    """
    require_sentences_and_wordnet(needed_by)


def meteor(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """METEOR of each text against its best reference, from 0 to 1, with alpha 0.9, beta 3 and gamma 0.5.

    A text that equals its reference scores a little below 1: the penalty for one chunk of `n` words is `0.5 / n**3`.
    An empty text scores 0.

    Args:
        generated_texts: `n` texts.
        references: for each at least one reference.

    Raises:
        MissingExtraError: NLTK is not installed.
        MissingResourceError: `punkt_tab` or WordNet is not there.
    """
    from nltk.translate.meteor_score import meteor_score

    stemmer, synonyms = porter(), _synonyms()
    split = readings(references, lambda texts: [words(text) for text in texts])
    return [
        float(meteor_score(tokens, words(generated), stemmer=stemmer, wordnet=synonyms))
        for generated, tokens in zip(generated_texts, split, strict=True)
    ]


class _Lemma:
    """One word that means the same."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class _Meanings:
    """All words that share a meaning with a word, as one of WordNet's sets."""

    def __init__(self, names: set[str]) -> None:
        self._lemmas = [_Lemma(name) for name in sorted(names)]

    def lemmas(self) -> list[_Lemma]:
        return self._lemmas


class _Synonyms:
    """The one question that METEOR asks WordNet, with the answers remembered."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.synsets = lru_cache(maxsize=REMEMBERED)(self._look_up)

    def _look_up(self, word: str) -> list[_Meanings]:
        names = {lemma.name() for synset in self._reader.synsets(word) for lemma in synset.lemmas()}
        single_words = {name for name in names if "_" not in name}
        return [_Meanings(single_words)] if single_words else []


@cache
def _synonyms() -> _Synonyms:
    return _Synonyms(wordnet("METEOR"))
