"""ROUGE-L as defined by the package py-rouge, against the best reference; py-rouge can no longer be imported.

    text -> lines -> truncation -> words of letters and digits -> stems -> F of the union of common subsequences

Irregular forms are looked up in WordNet's exception lists (`went`: `go`); all other words are stemmed by Porter's
algorithm as published. py-rouge's list of 137 words, mostly in -ment and -ology, whose stems its author set by hand
for DUC 2004, is not included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from rl4lms_like.core.numbers import Fraction, Positive, Whole
from rl4lms_like.scoring.nltk_data import CACHE_SIZE, porter, require_data, sentences, wordnet
from rl4lms_like.scoring.rouge import lcs_length, require_rouge, union_of_lines
from rl4lms_like.scoring.score import Score, Texts, readings

_OTHER = re.compile("[^A-Za-z0-9]")
_SHORTEST_STEMMED = 4
_NEWER_THAN_ROUGE = frozenset({"cognosenti", "halfpence", "lisente", "morses", "staretsy"})
"""Exceptions in WordNet 3.0 that are not in the version used by ROUGE."""


@dataclass(eq=False)
class RougeLMax(Score):
    """ROUGE-L as py-rouge defines it, against the best reference, from 0 to 1; an empty text scores 0.

    Args:
        max_n: has no effect; accepted for configs that set it.
        limit_length: truncate texts.
        length_limit: maximum length of a text; 0: no limit.
        length_limit_type: unit of the limit: `words`, or `bytes`, which in fact counts characters.
        apply_avg: has no effect, because references are compared one by one.
        apply_best: has no effect, for the same reason.
        stemming: compare stems.
        alpha: weight of the recall in the F-measure.
        weight_factor: precision and recall are raised to the inverse of this number.
        ensure_compatibility: follow the original Perl script: sentences are lines; False: NLTK's sentences and stems.
    """

    id = "rouge_l_max"
    needs_references = True

    max_n: int | None = None
    limit_length: bool = True
    length_limit: Whole = 665
    length_limit_type: Literal["words", "bytes"] = "bytes"
    apply_avg: bool = True
    apply_best: bool = False
    stemming: bool = True
    alpha: Fraction = 0.5
    weight_factor: Positive = 1.0
    ensure_compatibility: bool = True

    def __post_init__(self) -> None:
        require_rouge(self.needed_by)
        needed = {"punkt_tab": not self.ensure_compatibility, "wordnet": self.stemming}
        require_data(self.needed_by, *(name for name, is_needed in needed.items() if is_needed))

    def per_text(self, texts: Texts) -> list[float]:
        read = readings(texts.references, lambda each: [_lines(text, self) for text in each])
        scores = []
        for generated, references in zip(texts.responses, read, strict=True):
            lines = _lines(generated, self)
            scores.append(max(_f_measure(lines, reference, self) for reference in references))
        return scores


def _f_measure(generated: list[list[str]], reference: list[list[str]], settings: RougeLMax) -> float:
    precision, recall = _precision_and_recall(generated, reference)
    if not precision or not recall:
        return 0.0
    precision, recall = (fraction ** (1 / settings.weight_factor) for fraction in (precision, recall))
    return precision * recall / ((1 - settings.alpha) * precision + settings.alpha * recall)


def _precision_and_recall(generated: list[list[str]], reference: list[list[str]]) -> tuple[float, float]:
    if not generated or not reference:
        return 0.0, 0.0
    if len(generated) == len(reference) == 1:
        overlap = lcs_length(reference[0], generated[0])
        return overlap / len(generated[0]), overlap / len(reference[0])
    texts = ["\n".join(map(" ".join, lines)) for lines in (generated, reference)]
    score = union_of_lines(texts[0], texts[1], str.split)
    return float(score.precision), float(score.recall)


def _lines(text: str, settings: RougeLMax) -> list[list[str]]:
    """Return the stems of each non-empty line."""
    lines = text.split("\n") if settings.ensure_compatibility else sentences(text, "ROUGE-L")
    if settings.limit_length and settings.length_limit:
        lines = _cut(lines, settings.length_limit, by_words=settings.length_limit_type == "words")
    stems = (_stems(_OTHER.sub(" ", line.lower()).strip(), settings) for line in lines)
    return [line for line in stems if line]


def _cut(lines: list[str], limit: int, *, by_words: bool) -> list[str]:
    kept: list[str] = []
    for line in lines:
        parts: list[str] | str = line.split() if by_words else line.strip()
        fits = len(parts) < limit
        parts = parts if fits else parts[:limit]
        kept.append(parts if isinstance(parts, str) else " ".join(parts))
        limit -= len(parts)
        if not fits:
            break
    return kept


def _stems(line: str, settings: RougeLMax) -> list[str]:
    from nltk.tokenize import word_tokenize

    compatible = settings.ensure_compatibility
    # The underscores keep NLTK from splitting "cannot" into "can not".
    tokens = word_tokenize(line.replace("cannot", "_cannot_") if compatible else line, preserve_line=True)
    if settings.stemming:
        tokens = [_stem(token, compatible) if len(token) >= _SHORTEST_STEMMED else token for token in tokens]
    return [token.replace("_cannot_", "cannot") for token in tokens] if compatible else tokens


@lru_cache(maxsize=CACHE_SIZE)
def _stem(token: str, compatible: bool) -> str:
    irregular = _irregular_forms().get(token)
    return irregular or porter("ORIGINAL_ALGORITHM" if compatible else "NLTK_EXTENSIONS").stem(token)


@cache
def _irregular_forms() -> dict[str, str]:
    """Return form -> base form; the last list (nouns, verbs, adjectives, adverbs) that contains a form decides."""
    reader = wordnet("ROUGE-L with stems")
    forms: dict[str, str] = {}
    for name in ("noun.exc", "verb.exc", "adj.exc", "adv.exc"):
        with reader.open(name) as file:
            forms.update(line.split()[:2] for line in file if line.strip())
    return {form: base for form, base in forms.items() if form not in _NEWER_THAN_ROUGE}
