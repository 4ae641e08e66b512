"""Translation scores by sacrebleu (Post, 2018): BLEU, TER and chrF, of each text and of the corpus in one pass.

    references -> tokens, n-grams      once per call for each distinct list of references
    text       -> statistics -> score of the text
                  summed     -> score of the corpus

sacrebleu's public functions return one or the other and process every reference again. Its TER takes seconds for a text
of a hundred words; `edit_rate` is faster. Samples may have different numbers of references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import add
from typing import Any, Literal, TypeAlias

from rl4lms_like.core.errors import MissingResourceError, import_extra
from rl4lms_like.scoring.bleu import ReferenceGrams, n_grams_of
from rl4lms_like.scoring.edit_rate import edits
from rl4lms_like.scoring.nltk_data import EXTRA
from rl4lms_like.scoring.references import readings

SmoothMethod: TypeAlias = Literal["exp", "floor", "add-k", "none"]


@dataclass(frozen=True)
class SacreBleuSettings:
    """sacrebleu's options for BLEU.

    Args:
        smooth_method: smoothing of n-gram orders without a match.
        smooth_value: parameter of the methods `floor` (default 0.1) and `add-k` (default 1).
        lowercase: compare in lower case.
        tokenize: `13a` (also for None), `intl`, `zh`, `char`, `none` ...
        use_effective_order: leave out n-gram orders for which a text is too short.
    """

    smooth_method: SmoothMethod = "exp"
    smooth_value: float | None = None
    lowercase: bool = False
    tokenize: str | None = None
    use_effective_order: bool = False


class TranslationScores:
    """Scores of each text and of the corpus, on sacrebleu's scale of 0 to 100 (TER: edits per 100 words).

    Args:
        metric: sacrebleu's metric object.
        statistics: its counts for each text.
    """

    def __init__(self, metric: Any, statistics: list[Any]) -> None:
        self._metric = metric
        self._statistics = statistics

    @property
    def texts(self) -> list[float]:
        """Score of each text alone."""
        return [float(self._metric._compute_score_from_stats(each).score) for each in self._statistics]

    @property
    def corpus(self) -> float:
        """Score of all texts together, from the summed counts."""
        return float(self._metric._aggregate_and_compute(self._statistics).score)


def sacre_bleu(
    generated_texts: Sequence[str], references: Sequence[Sequence[str]], settings: SacreBleuSettings
) -> TranslationScores:
    """Return BLEU-4 with sacrebleu's tokens and smoothing; the brevity penalty uses the reference of nearest length.

    Args:
        generated_texts: `n` texts.
        references: at least one reference per text.
        settings: sacrebleu's options.
    """
    return _scores(_bleu(settings), generated_texts, references)


def ter(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> TranslationScores:
    """Return the translation edit rate (Snover et al., 2006): lower-cased edits per 100 reference words."""
    return _scores(_ter(), generated_texts, references)


def chrf(generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> TranslationScores:
    """Return chrF (Popović, 2015): F2 of character 1- to 6-grams against the best reference."""
    return _scores(_chrf(), generated_texts, references)


def require_sacrebleu(needed_by: str, settings: SacreBleuSettings | None = None) -> None:
    """Raise an error if sacrebleu or the tokenizer of `settings` is missing.

    Raises:
        MissingExtraError: sacrebleu is not installed.
        MissingResourceError: the tokenizer's model is not installed and cannot be downloaded.
        ValueError: there is no such tokenizer.
        RuntimeError: raised by sacrebleu for a tokenizer that needs another package.
    """
    sacrebleu = import_extra("sacrebleu", extra=EXTRA, needed_by=needed_by)
    if settings is None:
        return
    known = list(sacrebleu.BLEU.TOKENIZERS)
    if settings.tokenize is not None and settings.tokenize not in known:
        raise ValueError(f"sacrebleu has no tokenizer {settings.tokenize!r}; it has {', '.join(known)}")
    try:
        _bleu(settings)
    except OSError as error:
        raise MissingResourceError(
            f"the model of sacrebleu's tokenizer {settings.tokenize!r}",
            needed_by=needed_by,
            command=f"python -c \"import sacrebleu; sacrebleu.BLEU(tokenize='{settings.tokenize}')\"",
            offline="copy the folder models of ~/.sacrebleu, or set SACREBLEU to the folder that contains it",
        ) from error


@cache
def _bleu(settings: SacreBleuSettings) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    class Bleu(BLEU):
        """sacrebleu's BLEU with a faster count of n-grams."""

        def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
            return {"grams": ReferenceGrams([text.split() for text in refs])}

        def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
            tokens, grams = hypothesis.split(), ref_kwargs["grams"]
            nearest = self._get_closest_ref_len(len(tokens), grams.lengths)
            return [len(tokens), nearest, *grams.matches(tokens), *n_grams_of(len(tokens))]

    return Bleu(
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

    class Ter(TER):
        """sacrebleu's TER with a faster count of edits."""

        def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[float]:
            references, words = ref_kwargs["ref_words"], hypothesis.split()
            fewest = min(edits(words, reference) for reference in references)
            return [fewest, sum(map(len, references)) / len(references)]

    return Ter()


@cache
def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    class Chrf(CHRF):
        """sacrebleu's chrF that counts only those n-grams of a reference that the text contains."""

        def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
            return {"ref_ngrams": [_runs_of_letters(text, self.char_order) for text in refs]}

        def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[int]:
            counts = [Counter(runs) for runs in _runs_of_letters(hypothesis, self.char_order)]
            statistics = [_matches(counts, reference) for reference in ref_kwargs["ref_ngrams"]]
            return max(statistics, key=self._compute_f_score)

    return Chrf()


def _runs_of_letters(text: str, longest: int) -> list[list[str]]:
    """Return the character n-grams of each order from 1 to `longest`, without white space."""
    line = "".join(text.split())
    by_length = [list(line)]
    for length in range(1, longest):
        by_length.append(list(map(add, by_length[-1], line[length:])))
    return by_length


def _matches(counts: list[Counter[str]], reference: list[list[str]]) -> list[int]:
    """Return for each order: n-grams of the text (0 if the reference has none), of the reference, in common."""
    statistics = []
    for ours, theirs in zip(counts, reference, strict=True):
        both = Counter(filter(ours.__contains__, theirs))
        common = sum(map(min, both.values(), map(ours.__getitem__, both)))
        statistics += [ours.total() if theirs else 0, len(theirs), common]
    return statistics


def _scores(metric: Any, generated_texts: Sequence[str], references: Sequence[Sequence[str]]) -> TranslationScores:
    """Compute the scores by the steps that all of sacrebleu's metrics share."""
    infos = readings(
        references, lambda texts: metric._extract_reference_info([metric._preprocess_segment(text) for text in texts])
    )
    statistics = [
        metric._compute_segment_statistics(metric._preprocess_segment(generated), info)
        for generated, info in zip(generated_texts, infos, strict=True)
    ]
    _forget_texts(metric)
    return TranslationScores(metric, statistics)


def _forget_texts(metric: Any) -> None:
    """Clear the caches of sacrebleu's tokenizers, which would keep the last 65,536 texts of a run."""
    tokenizer = getattr(metric, "tokenizer", None)
    for each in (tokenizer, getattr(tokenizer, "_post_tokenizer", None)):
        if forget := getattr(type(each).__call__, "cache_clear", None):
            forget()
