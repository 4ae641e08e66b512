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

from rl4lms_like.scoring.nltk_data import CACHE_SIZE, EXTRA, porter, require_data, sentences, wordnet
from rl4lms_like.scoring.score import Score, Texts, readings
from rl4lms_like.system.errors import import_extra
from rl4lms_like.system.numbers import Fraction, Positive, Whole

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
    if use_single_ref:
        references = [texts[:1] for texts in references]
    read_references = readings(references, lambda texts: [_Text(text) for text in texts])

    # The best reference may be another one for each type.
    scores: dict[str, list[float]] = {rouge_type: [] for rouge_type in rouge_types}
    for generated, sample_references in zip(map(_Text, generated_texts), read_references, strict=True):
        for rouge_type in rouge_types:
            best = max(_f_measure(rouge_type, generated, reference) for reference in sample_references)
            scores[rouge_type].append(best)
    return scores


def lcs_length(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence (Hyyrö, 2004)."""
    # Token -> number whose bit i is set where first[i] is that token.
    positions: dict[Hashable, int] = {}
    for index, token in enumerate(first):
        positions[token] = positions.get(token, 0) | 1 << index

    # A row of the table of lengths L[j, i], as differences: bit i is 0 where L[j, i + 1] = L[j, i] + 1. One addition
    # does a whole row, because its carry runs from each match to the next 0. With M the matches of second[j]:
    #     V' = (V + (V & M)) | (V & ~M)      and L[j, n] is the number of zeros in V
    all_bits = (1 << len(first)) - 1
    row = all_bits
    for token in second:
        matches = row & positions.get(token, 0)
        if matches:
            row = (row + matches | row - matches) & all_bits
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
    # ROUGE-N (Lin, section 2): overlap of the counts of n-grams.
    if rouge_type == "rouge1":
        return _f_of_counts(generated.words, reference.words)
    if rouge_type == "rouge2":
        return _f_of_counts(generated.pairs, reference.pairs)

    # Summary-level ROUGE-L (section 3.2): each line of the reference against all lines of the text.
    if rouge_type == "rougeLsum" and not (generated.has_one_line and reference.has_one_line):
        return union_of_lines(generated.text, reference.text, lambda line: _Text(line).tokens).fmeasure

    # Sentence-level ROUGE-L (section 3.1).
    overlap = lcs_length(reference.tokens, generated.tokens)
    return _f(overlap, len(generated.tokens), len(reference.tokens))


def _f_of_counts(generated: Counter[Any], reference: Counter[Any]) -> float:
    # Clipped: an n-gram that is repeated in the text counts at most as often as it is in the reference.
    overlap = sum(min(count, reference[gram]) for gram, count in generated.items() if gram in reference)
    return _f(overlap, generated.total(), reference.total())


def _f(overlap: int, n_generated: int, n_reference: int) -> float:
    from rouge_score.scoring import fmeasure

    # F = 2 P R / (P + R), with P = overlap / n_generated and R = overlap / n_reference; 0 for an empty text.
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
        needed_data = []
        if not self.ensure_compatibility:
            needed_data.append("punkt_tab")
        if self.stemming:
            needed_data.append("wordnet")
        require_data(self.needed_by, *needed_data)

    def per_text(self, texts: Texts) -> list[float]:
        read_references = readings(texts.references, lambda references: [_lines(text, self) for text in references])
        scores = []
        for response, references in zip(texts.responses, read_references, strict=True):
            lines = _lines(response, self)
            scores.append(max(_weighted_f(lines, reference, self) for reference in references))
        return scores


def _weighted_f(generated: list[list[str]], reference: list[list[str]], settings: RougeLMaxScore) -> float:
    precision, recall = _precision_and_recall(generated, reference)
    if not precision or not recall:
        return 0.0

    # ROUGE-W's inverse weighting f^-1(k) = k^(1/w) (Lin, section 4), here of the fractions; w = 1 changes nothing.
    #     F = P R / ((1 - alpha) P + alpha R)
    precision = precision ** (1 / settings.weight_factor)
    recall = recall ** (1 / settings.weight_factor)
    return precision * recall / ((1 - settings.alpha) * precision + settings.alpha * recall)


def _precision_and_recall(generated: list[list[str]], reference: list[list[str]]) -> tuple[float, float]:
    if not generated or not reference:
        return 0.0, 0.0

    # For one line, the union of subsequences is the longest one, whose length is computed faster without tracing it.
    if len(generated) == len(reference) == 1:
        overlap = lcs_length(reference[0], generated[0])
        return overlap / len(generated[0]), overlap / len(reference[0])

    generated_text = "\n".join(map(" ".join, generated))
    reference_text = "\n".join(map(" ".join, reference))
    score = union_of_lines(generated_text, reference_text, str.split)
    return float(score.precision), float(score.recall)


def _lines(text: str, settings: RougeLMaxScore) -> list[list[str]]:
    """Return the stems of each non-empty line."""
    lines = text.split("\n") if settings.ensure_compatibility else sentences(text, "ROUGE-L")

    # Before the words are read, as in py-rouge: the limit counts the characters of the text itself.
    if settings.limit_length and settings.length_limit:
        lines = _cut(lines, settings.length_limit, by_words=settings.length_limit_type == "words")

    stems_of_lines = (_stems(_OTHER.sub(" ", line.lower()).strip(), settings) for line in lines)
    return [stems for stems in stems_of_lines if stems]


def _cut(lines: list[str], limit: int, *, by_words: bool) -> list[str]:
    """Return the first lines, as many as have `limit` words or characters together; the last one may be cut."""
    shortened: list[str] = []
    for line in lines:
        # Words or characters: both have a length and a beginning.
        units: list[str] | str = line.split() if by_words else line.strip()
        is_last = len(units) >= limit
        if is_last:
            units = units[:limit]
        shortened.append(units if isinstance(units, str) else " ".join(units))

        limit -= len(units)
        if is_last:
            break
    return shortened


def _stems(line: str, settings: RougeLMaxScore) -> list[str]:
    from nltk.tokenize import word_tokenize

    # The underscores keep NLTK from splitting "cannot" into "can not", which the Perl script does not do.
    is_compatible = settings.ensure_compatibility
    tokens = word_tokenize(line.replace("cannot", "_cannot_") if is_compatible else line, preserve_line=True)

    # Stemmed with the underscores: Porter's rules leave "_cannot_" as it is.
    if settings.stemming:
        stems = []
        for token in tokens:
            stems.append(_stem(token, is_compatible) if len(token) >= _SHORTEST_STEMMED else token)
        tokens = stems
    if is_compatible:
        tokens = [token.replace("_cannot_", "cannot") for token in tokens]
    return tokens


@lru_cache(maxsize=CACHE_SIZE)
def _stem(token: str, is_compatible: bool) -> str:
    # An irregular form has its base form as its stem: Porter's rules only remove endings ("went" stays "went").
    irregular = _irregular_forms().get(token)
    return irregular or porter("ORIGINAL_ALGORITHM" if is_compatible else "NLTK_EXTENSIONS").stem(token)


@cache
def _irregular_forms() -> dict[str, str]:
    """Return form -> base form; the last list (nouns, verbs, adjectives, adverbs) that contains a form decides."""
    reader = wordnet("ROUGE-L with stems")
    forms: dict[str, str] = {}
    for name in ("noun.exc", "verb.exc", "adj.exc", "adv.exc"):
        with reader.open(name) as file:
            # "went go", or with several base forms "axes ax axis": the first is used.
            forms.update(line.split()[:2] for line in file if line.strip())
    return {form: base for form, base in forms.items() if form not in _NEWER_THAN_ROUGE}
