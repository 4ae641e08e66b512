"""ROUGE-L as defined by the package py-rouge, against the best reference; py-rouge can no longer be imported.

    text -> lines -> truncation -> words of letters and digits -> stems -> F of the union of common subsequences

Irregular forms are looked up in WordNet's exception lists (`went`: `go`); all other words are stemmed by Porter's
algorithm as published. py-rouge's list of 137 words, mostly in -ment and -ology, whose stems its author set by hand
for DUC 2004, is not included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from rl4lms_like.scoring.nltk_data import (
    require_sentences,
    require_sentences_and_wordnet,
    require_wordnet,
    sentences,
    wordnet,
)
from rl4lms_like.scoring.references import readings
from rl4lms_like.scoring.rouge import lcs_length, require_rouge
from rl4lms_like.scoring.stems import REMEMBERED, porter

_OTHER = re.compile("[^A-Za-z0-9]")
_SHORTEST_STEMMED = 4
_NEWER_THAN_ROUGE = frozenset({"cognosenti", "halfpence", "lisente", "morses", "staretsy"})
"""Exceptions in WordNet 3.0 that are not in the version used by ROUGE."""


@dataclass(frozen=True)
class RougeLSettings:
    """py-rouge's options for ROUGE-L.

    Args:
        limit_length: truncate the texts.
        length_limit: maximum length; 0: no truncation.
        length_limit_type: unit of the length, `words` or `bytes`; as in py-rouge, `bytes` are in fact characters.
        stemming: compare stems.
        alpha: weight of the recall in the F-measure, from 0 to 1.
        weight_factor: precision and recall are raised to the power `1 / weight_factor`.
        ensure_compatibility: follow the original Perl script: sentences are lines, `cannot` is one word, Porter's stems
            as published. False: NLTK's sentences, `can not`, NLTK's stems.
    """

    limit_length: bool = True
    length_limit: int = 665
    length_limit_type: Literal["words", "bytes"] = "bytes"
    stemming: bool = True
    alpha: float = 0.5
    weight_factor: float = 1.0
    ensure_compatibility: bool = True


def require_rouge_l_max(settings: RougeLSettings, needed_by: str) -> None:
    """Raise an error if a package or data file needed by the settings is missing.

    Raises:
        MissingExtraError: rouge-score or NLTK is not installed.
        MissingResourceError: WordNet (for stems) or `punkt_tab` (for NLTK's sentences) is not installed.
    """
    require_rouge(needed_by)
    if settings.stemming and not settings.ensure_compatibility:
        require_sentences_and_wordnet(needed_by)
    elif settings.stemming:
        require_wordnet(needed_by)
    elif not settings.ensure_compatibility:
        require_sentences(needed_by)


def rouge_l_max(
    generated_texts: Sequence[str], references: Sequence[Sequence[str]], settings: RougeLSettings
) -> list[float]:
    """Return the ROUGE-L F-measure of each text against its best reference, from 0 to 1; an empty text scores 0.

    Args:
        generated_texts: `n` texts.
        references: at least one reference per text.
        settings: py-rouge's options.
    """
    read = readings(references, lambda texts: [_lines(text, settings) for text in texts])
    scores = []
    for generated, texts in zip(generated_texts, read, strict=True):
        lines = _lines(generated, settings)
        scores.append(max(_f_measure(lines, reference, settings) for reference in texts))
    return scores


def _f_measure(generated: list[list[str]], reference: list[list[str]], settings: RougeLSettings) -> float:
    precision, recall = _precision_and_recall(generated, reference)
    if not precision or not recall:
        return 0.0
    precision, recall = (share ** (1 / settings.weight_factor) for share in (precision, recall))
    return precision * recall / ((1 - settings.alpha) * precision + settings.alpha * recall)


def _precision_and_recall(generated: list[list[str]], reference: list[list[str]]) -> tuple[float, float]:
    if not generated or not reference:
        return 0.0, 0.0
    if len(generated) == len(reference) == 1:
        overlap = lcs_length(reference[0], generated[0])
        return overlap / len(generated[0]), overlap / len(reference[0])
    score = _united().score(*("\n".join(map(" ".join, lines)) for lines in (reference, generated)))["rougeLsum"]
    return float(score.precision), float(score.recall)


@cache
def _united():  # type: ignore[no-untyped-def]
    """Return rouge-score's scorer of the union over lines, for texts whose words are already stems."""
    from rouge_score.rouge_scorer import RougeScorer

    class Words:
        """Tokenizer that splits at white space."""

        def tokenize(self, text: str) -> list[str]:
            return text.split()

    return RougeScorer(["rougeLsum"], tokenizer=Words())


def _lines(text: str, settings: RougeLSettings) -> list[list[str]]:
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


def _stems(line: str, settings: RougeLSettings) -> list[str]:
    from nltk.tokenize import word_tokenize

    compatible = settings.ensure_compatibility
    # The underscores keep NLTK from splitting "cannot" into "can not".
    tokens = word_tokenize(line.replace("cannot", "_cannot_") if compatible else line, preserve_line=True)
    if settings.stemming:
        tokens = [_stem(token, compatible) if len(token) >= _SHORTEST_STEMMED else token for token in tokens]
    return [token.replace("_cannot_", "cannot") for token in tokens] if compatible else tokens


@lru_cache(maxsize=REMEMBERED)
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
