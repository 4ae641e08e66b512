"""Scores of translations by sacrebleu (Post, 2018): BLEU, TER and chrF, of each text and of the corpus at once.

    references -> tokens, n-grams      once a call for each distinct list of references
    text       -> statistics -> score of the text
                  summed     -> score of the corpus

sacrebleu's own public calls give one or the other, and read every reference anew. Samples may have different numbers of
references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from rl4lms_like.core.errors import import_extra
from rl4lms_like.scoring.nltk_data import EXTRA
from rl4lms_like.scoring.references import readings

SmoothMethod: TypeAlias = Literal["exp", "floor", "add-k", "none"]


@dataclass(frozen=True)
class SacreBleuSettings:
    """sacrebleu's arguments of BLEU.

    Args:
        smooth_method: what is done about n-gram orders without a match.
        smooth_value: of the methods `floor` (default 0.1) and `add-k` (default 1).
        lowercase: compare in lower case.
        tokenize: `13a` (also for None), `intl`, `zh`, `char`, `none` ...
        use_effective_order: leave out orders that a short text has not.
    """

    smooth_method: SmoothMethod = "exp"
    smooth_value: float | None = None
    lowercase: bool = False
    tokenize: str | None = None
    use_effective_order: bool = False


class TranslationScores:
    """The score of each text alone and of all together, on sacrebleu's scale of 0 to 100 (TER: edits per 100 words).

    Args:
        metric: sacrebleu's.
        statistics: its counts, of each text.
    """

    def __init__(self, metric: Any, statistics: list[Any]) -> None:
        self._metric = metric
        self._statistics = statistics

    @property
    def texts(self) -> list[float]:
        """Of each text alone."""
        return [float(self._metric._aggregate_and_compute([each]).score) for each in self._statistics]

    @property
    def corpus(self) -> float:
        """Of all together: the counts are summed first."""
        return float(self._metric._aggregate_and_compute(self._statistics).score)


def sacre_bleu(
    generated_texts: Sequence[str], references: Sequence[Sequence[str]], settings: SacreBleuSettings
) -> TranslationScores:
    """BLEU-4 with sacrebleu's tokens and smoothing; the brevity penalty counts the reference of the nearest length.

    Args:
        generated_texts: `n` texts.
        references: for each at least one reference.
        settings: sacrebleu's.
    """
    return _scores(_bleu(settings), generated_texts, references)


def ter(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> TranslationScores:
    """Translation edit rate (Snover et al., 2006): edits to the nearest reference per 100 of its words, lower-cased."""
    return _scores(_ter(), generated_texts, references)


def chrf(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> TranslationScores:
    """ChrF (Popović, 2015): F2 of character 1- to 6-grams against the best reference."""
    return _scores(_chrf(), generated_texts, references)


def require_sacrebleu(needed_by: str, settings: SacreBleuSettings | None = None) -> None:
    """Nothing, or an error if sacrebleu or the tokenizer of `settings` is not there.

    Raises:
        MissingExtraError: sacrebleu is not installed.
        ValueError: there is no such tokenizer.
        RuntimeError: sacrebleu's, for a tokenizer that needs a package of its own.
    """
    sacrebleu = import_extra("sacrebleu", extra=EXTRA, needed_by=needed_by)
    if settings is None:
        return
    known = list(sacrebleu.BLEU.TOKENIZERS)
    if settings.tokenize is not None and settings.tokenize not in known:
        raise ValueError(f"sacrebleu has no tokenizer {settings.tokenize!r}; it has {', '.join(known)}")
    _bleu(settings)


@cache
def _bleu(settings: SacreBleuSettings) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(
        lowercase=settings.lowercase,
        force=True,
        tokenize=settings.tokenize,
        smooth_method=settings.smooth_method,
        smooth_value=settings.smooth_value,
        effective_order=settings.use_effective_order,
    )


@cache
def _ter() -> Any:
    from sacrebleu.metrics.ter import TER

    return TER()


@cache
def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    class Chrf(CHRF):
        """sacrebleu's, whose counts of common n-grams are made without a loop in Python."""

        @staticmethod
        def _get_match_statistics(hyp_ngrams: Counter[str], ref_ngrams: Counter[str]) -> list[int]:
            common = hyp_ngrams.keys() & ref_ngrams.keys()
            matches = sum(map(min, map(hyp_ngrams.__getitem__, common), map(ref_ngrams.__getitem__, common)))
            return [hyp_ngrams.total() if ref_ngrams else 0, ref_ngrams.total(), matches]

    return Chrf()


def _scores(metric: Any, generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> TranslationScores:
    """By the steps that every one of sacrebleu's metrics consists of."""
    infos = readings(
        references, lambda texts: metric._extract_reference_info([metric._preprocess_segment(text) for text in texts])
    )
    statistics = [
        metric._compute_segment_statistics(metric._preprocess_segment(generated), info)
        for generated, info in zip(generated_texts, infos, strict=True)
    ]
    return TranslationScores(metric, statistics)
