"""Translation scores by sacrebleu (Post, 2018): BLEU, TER and chrF, of each text and of the corpus in one pass.

    references -> tokens, n-grams      once per call for each distinct list of references
    text       -> statistics -> score of the text
                  summed     -> score of the corpus

sacrebleu's public functions return one or the other and process every reference again. Its TER takes seconds for a text
of a hundred words; `edit_rate` is faster. Samples may have different numbers of references.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from rl4lms_like.scoring.edit_rate import edits
from rl4lms_like.scoring.nltk_data import EXTRA
from rl4lms_like.scoring.score import Score, Texts, readings
from rl4lms_like.system.errors import MissingResourceError, import_extra
from rl4lms_like.system.numbers import NonNegative

SmoothMethod: TypeAlias = Literal["exp", "floor", "add-k", "none"]


@dataclass(eq=False)
class TranslationScore(Score):
    """Score by one of sacrebleu's metrics, of each text and of all texts together, divided by 100."""

    needs_references = True

    @property
    @abstractmethod
    def metric(self) -> Any:
        """Sacrebleu's metric object."""

    def __post_init__(self) -> None:
        import_extra("sacrebleu", extra=EXTRA, needed_by=self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        return self.with_overall(texts)[0]

    def with_overall(self, texts: Texts) -> tuple[list[float], float]:
        """Return the scores by the steps that all of sacrebleu's metrics share; the last is from the summed counts."""
        metric = self.metric

        def read(references: tuple[str, ...]) -> dict[str, Any]:
            return metric._extract_reference_info(list(map(metric._preprocess_segment, references)))

        # Statistics of a text: counts, such as matching n-grams of each order, edits and reference words. The score of
        # a corpus is that of the sums, not the mean of the scores.
        statistics = []
        for response, reference_info in zip(texts.responses, readings(texts.references, read), strict=True):
            statistics.append(self._statistics(metric, metric._preprocess_segment(response), reference_info))
        _clear_caches(metric)

        # sacrebleu's scores are percentages.
        scores = [float(metric._compute_score_from_stats(counts).score) / 100 for counts in statistics]
        return scores, float(metric._aggregate_and_compute(statistics).score) / 100

    def _statistics(self, metric: Any, text: str, reference_info: dict[str, Any]) -> list[float]:
        return metric._compute_segment_statistics(text, reference_info)


@dataclass(eq=False)
class SacreBleuScore(TranslationScore):
    """BLEU-4 by sacrebleu, from 0 to 1; the brevity penalty uses the reference of nearest length.

    Args:
        smooth_method: smoothing of n-gram orders without a match.
        smooth_value: parameter of the methods `floor` (default 0.1) and `add-k` (default 1).
        force: has no effect, because sacrebleu's warning about tokenized text is never printed.
        lowercase: compare in lower case.
        tokenize: `13a` (also for null), `intl`, `zh`, `char`, `none` ...
        use_effective_order: ignore n-gram orders that are longer than the text.
    """

    id = "sacre_bleu"

    smooth_method: SmoothMethod = "exp"
    smooth_value: NonNegative | None = None
    force: bool = False
    lowercase: bool = False
    tokenize: str | None = None
    use_effective_order: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        import sacrebleu

        known = list(sacrebleu.BLEU.TOKENIZERS)
        if self.tokenize is not None and self.tokenize not in known:
            raise ValueError(f"sacrebleu has no tokenizer {self.tokenize!r}; it has {', '.join(known)}")

        # Some tokenizers download a model when they are made, which fails here instead of during a run.
        try:
            _ = self.metric
        except OSError as error:
            raise MissingResourceError(
                f"the model of sacrebleu's tokenizer {self.tokenize!r}",
                needed_by=self.needed_by,
                command=f"python -c \"import sacrebleu; sacrebleu.BLEU(tokenize='{self.tokenize}')\"",
                offline="copy the folder models of ~/.sacrebleu, or set SACREBLEU to the folder that contains it",
            ) from error

    @property
    def metric(self) -> Any:
        # `force` turns off a warning about texts that look tokenized.
        return _metric(
            "BLEU",
            lowercase=self.lowercase,
            force=True,
            tokenize=self.tokenize,
            smooth_method=self.smooth_method,
            smooth_value=self.smooth_value,
            effective_order=self.use_effective_order,
        )


class TranslationEditRate(TranslationScore):
    """Translation edit rate (Snover et al., 2006): lower-cased edits per reference word."""

    id = "ter"

    @property
    def metric(self) -> Any:
        return _metric("TER")

    def _statistics(self, metric: Any, text: str, reference_info: dict[str, Any]) -> list[float]:
        # TER = edits to the nearest reference / mean number of reference words (Snover et al., 2006), as in sacrebleu.
        references = reference_info["ref_words"]
        words = text.split()
        fewest_edits = min(edits(words, reference) for reference in references)
        return [fewest_edits, sum(map(len, references)) / len(references)]


class ChrF(TranslationScore):
    """chrF (Popović, 2015): F2 of character 1- to 6-grams against the best reference, from 0 to 1."""

    id = "chrf"

    @property
    def metric(self) -> Any:
        return _metric("CHRF")


@cache  # a tokenizer of sentence pieces loads a model
def _metric(name: str, **options: Any) -> Any:
    import sacrebleu

    return getattr(sacrebleu, name)(**options)


def _clear_caches(metric: Any) -> None:
    """Clear the caches of sacrebleu's tokenizers, which would keep the last 65,536 texts of a run."""
    # The caches are those of the classes' `__call__`, which `lru_cache` decorates; chrF has no tokenizer.
    tokenizer = getattr(metric, "tokenizer", None)
    for cached_tokenizer in (tokenizer, getattr(tokenizer, "_post_tokenizer", None)):
        cache_clear = getattr(type(cached_tokenizer).__call__, "cache_clear", None)
        if cache_clear is not None:
            cache_clear()
