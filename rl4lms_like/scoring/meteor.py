"""METEOR (Lavie and Agarwal, 2007) by NLTK, on NLTK's words, against the best reference.

    generated  | the quick  cats sat on a rug      matched by form, then by stem, then by WordNet's synonyms
    reference  | the fast   cat  sat on the mat

Stems and synonyms are cached by word, and each reference is tokenised once per call. The alignment and the score are
NLTK's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from rl4lms_like.scoring.nltk_data import require_sentences_and_wordnet, wordnet, words
from rl4lms_like.scoring.references import readings
from rl4lms_like.scoring.stems import REMEMBERED, porter


def require_meteor(needed_by: str) -> None:
    """Raise an error if a package or data file of METEOR is missing.

    Raises:
        MissingExtraError: NLTK is not installed.
        MissingResourceError: `punkt_tab`, WordNet or both are not installed.
    """
    require_sentences_and_wordnet(needed_by)


def meteor(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return METEOR of each text against its best reference, from 0 to 1, with alpha 0.9, beta 3 and gamma 0.5.

    A text that equals its reference scores a little below 1: the penalty for one chunk of `n` words is `0.5 / n**3`.
    An empty text scores 0.

    Args:
        generated_texts: `n` texts.
        references: at least one reference per text.

    Raises:
        MissingExtraError: NLTK is not installed.
        MissingResourceError: `punkt_tab` or WordNet is not installed.
    """
    from nltk.translate.meteor_score import meteor_score

    stemmer, synonyms = porter(), _synonyms()
    split = readings(references, lambda texts: [words(text) for text in texts])
    return [
        float(meteor_score(tokens, words(generated), stemmer=stemmer, wordnet=synonyms))
        for generated, tokens in zip(generated_texts, split, strict=True)
    ]


class _Lemma:
    """Synonym, with the interface of NLTK's lemmas."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class _Meanings:
    """All synonyms of a word, with the interface of NLTK's synsets."""

    def __init__(self, names: set[str]) -> None:
        self._lemmas = [_Lemma(name) for name in sorted(names)]

    def lemmas(self) -> list[_Lemma]:
        return self._lemmas


class _Synonyms:
    """Cached lookup of synonyms, the part of NLTK's WordNet reader that METEOR calls."""

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
