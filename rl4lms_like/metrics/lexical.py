"""Metrics of word and character overlap with the references. Rewards with the same ids call the same functions."""

from __future__ import annotations

from typing import Literal

from rl4lms_like.core.numbers import NonNegative, Positive, Share, Whole
from rl4lms_like.metrics.base import MetricResults
from rl4lms_like.metrics.references import ReferenceMetric
from rl4lms_like.scoring.bleu import bleu
from rl4lms_like.scoring.meteor import meteor, require_meteor
from rl4lms_like.scoring.references import mean
from rl4lms_like.scoring.rouge import ROUGE_TYPES, require_rouge, rouge
from rl4lms_like.scoring.rouge_l_max import RougeLSettings, require_rouge_l_max, rouge_l_max
from rl4lms_like.scoring.translation import (
    SacreBleuSettings,
    SmoothMethod,
    TranslationScores,
    chrf,
    require_sacrebleu,
    sacre_bleu,
    ter,
)


class MeteorMetric(ReferenceMetric):
    """METEOR against the best reference, from 0 to 1, of each text and on average."""

    keys = ("lexical/meteor",)

    def __init__(self) -> None:
        require_meteor("the metric 'meteor'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        scores = meteor(generated_texts, references)
        return {"lexical/meteor": (scores, mean(scores))}


class RougeMetric(ReferenceMetric):
    """ROUGE F-measures with stemming, from 0 to 1, of each text and on average.

    Args:
        use_single_ref: compare with the first reference; False: with the best for each type.
    """

    keys = tuple(f"lexical/rouge_{rouge_type}" for rouge_type in ROUGE_TYPES)

    def __init__(self, use_single_ref: bool = True) -> None:
        require_rouge("the metric 'rouge'")
        self.use_single_ref = use_single_ref

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        by_type = rouge(generated_texts, references, use_single_ref=self.use_single_ref)
        return {f"lexical/rouge_{rouge_type}": (scores, mean(scores)) for rouge_type, scores in by_type.items()}


class RougeLMax(ReferenceMetric):
    """ROUGE-L as py-rouge defines it, against the best reference, from 0 to 1, of each text and on average.

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

    keys = ("lexical/rouge_l_max",)

    def __init__(
        self,
        max_n: int | None = None,
        limit_length: bool = True,
        length_limit: Whole = 665,
        length_limit_type: Literal["words", "bytes"] = "bytes",
        apply_avg: bool = True,
        apply_best: bool = False,
        stemming: bool = True,
        alpha: Share = 0.5,
        weight_factor: Positive = 1.0,
        ensure_compatibility: bool = True,
    ) -> None:
        self.settings = RougeLSettings(
            limit_length, length_limit, length_limit_type, stemming, alpha, weight_factor, ensure_compatibility
        )
        require_rouge_l_max(self.settings, "the metric 'rouge_l_max'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        scores = rouge_l_max(generated_texts, references, self.settings)
        return {"lexical/rouge_l_max": (scores, mean(scores))}


class BLEUMetric(ReferenceMetric):
    """BLEU-4, from 0 to 1, of each text and of the corpus, which is not the mean over texts."""

    keys = ("lexical/bleu",)

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        scores = bleu(generated_texts, references)
        return {"lexical/bleu": (scores.texts, scores.corpus)}


class SacreBLEUMetric(ReferenceMetric):
    """BLEU by sacrebleu, from 0 to 1, of each text and of the corpus, which is not the mean over texts.

    Args:
        smooth_method: smoothing of n-gram orders without a match.
        smooth_value: parameter of the methods `floor` (default 0.1) and `add-k` (default 1).
        force: has no effect, because sacrebleu's warning about tokenized text is never printed.
        lowercase: compare in lower case.
        tokenize: `13a` (also for null), `intl`, `zh`, `char`, `none` ...
        use_effective_order: ignore n-gram orders that are longer than the text.
    """

    keys = ("lexical/sacrebleu",)

    def __init__(
        self,
        smooth_method: SmoothMethod = "exp",
        smooth_value: NonNegative | None = None,
        force: bool = False,
        lowercase: bool = False,
        tokenize: str | None = None,
        use_effective_order: bool = False,
    ) -> None:
        self.settings = SacreBleuSettings(smooth_method, smooth_value, lowercase, tokenize, use_effective_order)
        require_sacrebleu("the metric 'sacre_bleu'", self.settings)

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        return {"lexical/sacrebleu": _as_shares(sacre_bleu(generated_texts, references, self.settings))}


class TERMetric(ReferenceMetric):
    """Translation edit rate (lower is better) of each text and of the corpus, where long references weigh more."""

    keys = ("lexical/ter",)

    def __init__(self) -> None:
        require_sacrebleu("the metric 'ter'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        return {"lexical/ter": _as_shares(ter(generated_texts, references))}


class chrFmetric(ReferenceMetric):  # noqa: N801 - RL4LMs' name
    """chrF, from 0 to 1, of each text and of the corpus, from the summed counts."""

    keys = ("lexical/chrf",)

    def __init__(self) -> None:
        require_sacrebleu("the metric 'chrf'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> MetricResults:
        return {"lexical/chrf": _as_shares(chrf(generated_texts, references))}


def _as_shares(scores: TranslationScores) -> tuple[list[float], float]:
    return [score / 100 for score in scores.texts], scores.corpus / 100
