"""ROUGE (Lin, 2004) as computed by the package rouge-score, with Porter's stems.

rouge1, rouge2    overlap of words, of pairs of words
rougeL            longest common subsequence of the whole texts
rougeLsum         union of the subsequences with all lines for each reference line; equal to rougeL for one line

Each text is processed once per call. Tokens and the union over lines are rouge-score's. The length of a subsequence is
computed with the bits of one large integer (Hyyrö, 2004), a machine word at a time instead of cell by cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from rl4lms_like.core.errors import import_extra
from rl4lms_like.scoring.nltk_data import EXTRA, porter
from rl4lms_like.scoring.score import readings

RougeType: TypeAlias = Literal["rouge1", "rouge2", "rougeL", "rougeLsum"]

ROUGE_TYPES: tuple[RougeType, ...] = ("rouge1", "rouge2", "rougeL", "rougeLsum")


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
