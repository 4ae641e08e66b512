"""ROUGE (Lin, 2004) as computed by the package rouge-score, with Porter's stems, and ROUGE-L of the package py-rouge.

rouge1, rouge2    overlap of words, of pairs of words
rougeL            longest common subsequence of the whole texts
rougeLsum         union of the subsequences with all lines for each reference line; equal to rougeL for one line

Each text is processed once per call. Tokens and the union over lines are rouge-score's. The length of a subsequence is
computed with the bits of one large integer (Hyyrö, 2004), a machine word at a time instead of cell by cell.

py-rouge can no longer be imported. Its steps for `rouge_l_max`:

    text -> lines -> truncation -> words of letters and digits -> stems -> F of the union of common subsequences

Irregular forms are looked up in WordNet's exception lists (`went`: `go`); all other words are stemmed by Porter's
algorithm as published. py-rouge's list of 137 words, mostly in -ment and -ology, whose stems its author set by hand
for DUC 2004, is not included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from rl4lms_like.core.errors import import_extra
from rl4lms_like.core.numbers import Fraction, Positive, Whole
from rl4lms_like.scoring.nltk_data import CACHE_SIZE, EXTRA, porter, require_data, sentences, wordnet
from rl4lms_like.scoring.score import Score, Texts, readings

RougeType: TypeAlias = Literal["rouge1", "rouge2", "rougeL", "rougeLsum"]

ROUGE_TYPES: tuple[RougeType, ...] = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_OTHER = re.compile("[^A-Za-z0-9]")
_SHORTEST_STEMMED = 4
_NEWER_THAN_ROUGE = frozenset({"cognosenti", "halfpence", "lisente", "morses", "staretsy"})
"""Exceptions in WordNet 3.0 that are not in the version used by ROUGE."""


def require_rouge(needed_by: str) -> None:
    """Raise a `MissingExtraError` if rouge-score is not installed."""
    import_extra("rouge_score.rouge_scorer", extra=EXTRA, needed_by=needed_by)


def rouge(
    generated_texts: Sequence[str],
    references: Sequence[Sequence[str]],
    rouge_types: Sequence[RougeType] = ROUGE_TYPES,
    *,
    use_single_ref: bool = True,
) -> dict[str, list[float]]:
    """Return the F-measures of each text, by type, from 0 to 1; an empty text scores 0.

    Each text is compared with its first reference, or without `use_single_ref` with the best one for each type.
    """
    require_rouge("ROUGE")
    chosen = [texts[:1] for texts in references] if use_single_ref else references
    read = readings(chosen, lambda texts: [_Text(text) for text in texts])
    scores: dict[str, list[float]] = {rouge_type: [] for rouge_type in rouge_types}
    for generated, texts in zip(map(_Text, generated_texts), read, strict=True):
        for rouge_type in rouge_types:
            scores[rouge_type].append(max(_f_measure(rouge_type, generated, text) for text in texts))
    return scores


def lcs_length(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence (Hyyrö, 2004)."""
    positions: dict[Hashable, int] = {}
    for index, token in enumerate(first):
        positions[token] = positions.get(token, 0) | 1 << index
    everywhere = (1 << len(first)) - 1
    row = everywhere  # bit i is 0 if the subsequence grows at first[i]
    for token in second:
        matches = row & positions.get(token, 0)
        if matches:
            row = (row + matches | row - matches) & everywhere
    return len(first) - row.bit_count()


class _Text:
    """Text with the counts that ROUGE needs, each computed at first use."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def tokens(self) -> list[str]:
        from rouge_score.tokenize import tokenize

        tokens: list[str] = tokenize(self.text, porter())
        return tokens

    @cached_property
    def words(self) -> Counter[Any]:
        return Counter(self.tokens)

    @cached_property
    def pairs(self) -> Counter[Any]:
        return Counter(zip(self.tokens, self.tokens[1:], strict=False))

    @cached_property
    def has_one_line(self) -> bool:
        return sum(map(bool, self.text.split("\n"))) <= 1


def _f_measure(rouge_type: RougeType, generated: _Text, reference: _Text) -> float:
    if rouge_type == "rougeLsum" and not (generated.has_one_line and reference.has_one_line):
        return union_of_lines(generated.text, reference.text, lambda line: _Text(line).tokens).fmeasure
    if rouge_type == "rouge1":
        return _f_of_counts(generated.words, reference.words)
    if rouge_type == "rouge2":
        return _f_of_counts(generated.pairs, reference.pairs)
    overlap = lcs_length(reference.tokens, generated.tokens)
    return _f(overlap, len(generated.tokens), len(reference.tokens))


def _f_of_counts(generated: Counter[Any], reference: Counter[Any]) -> float:
    overlap = sum(min(count, reference[gram]) for gram, count in generated.items() if gram in reference)
    return _f(overlap, generated.total(), reference.total())


def _f(overlap: int, n_generated: int, n_reference: int) -> float:
    from rouge_score.scoring import fmeasure

    return float(fmeasure(overlap / max(n_generated, 1), overlap / max(n_reference, 1)))


def union_of_lines(generated: str, reference: str, tokenize: Callable[[str], list[str]]) -> Any:
    """Return rouge-score's precision, recall and F of the union of common subsequences over lines."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeLsum"], tokenizer=SimpleNamespace(tokenize=tokenize))
    return scorer.score(reference, generated)["rougeLsum"]


@dataclass(eq=False)
class RougeLMaxScore(Score):
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
            scores.append(max(_weighted_f(lines, reference, self) for reference in references))
        return scores


def _weighted_f(generated: list[list[str]], reference: list[list[str]], settings: RougeLMaxScore) -> float:
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


def _lines(text: str, settings: RougeLMaxScore) -> list[list[str]]:
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


def _stems(line: str, settings: RougeLMaxScore) -> list[str]:
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
