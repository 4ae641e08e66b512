"""Metrics of word and character overlap with the references; the scores are those of the rewards with the same ids."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.metrics.base import MetricResults, ScoreMetric, TextsMetric
from rl4lms_like.scoring import rouge_l_max
from rl4lms_like.scoring.bleu import Bleu
from rl4lms_like.scoring.meteor import Meteor
from rl4lms_like.scoring.rouge import ROUGE_TYPES, require_rouge, rouge
from rl4lms_like.scoring.score import Texts, mean
from rl4lms_like.scoring.translation import ChrF, SacreBleuScore, TranslationEditRate


class MeteorMetric(Meteor, ScoreMetric):
    """METEOR against the best reference, from 0 to 1, of each text and on average."""

    keys = ("lexical/meteor",)


@dataclass(eq=False)
class RougeMetric(TextsMetric):
    """ROUGE F-measures with stemming, from 0 to 1, of each text and on average.

    Args:
        use_single_ref: compare with the first reference; False: with the best for each type.
    """

    needs_references = True
    keys = tuple(f"lexical/rouge_{rouge_type}" for rouge_type in ROUGE_TYPES)

    use_single_ref: bool = True

    def __post_init__(self) -> None:
        require_rouge("the metric 'rouge'")

    def results(self, texts: Texts) -> MetricResults:
        by_type = rouge(texts.responses, texts.references, use_single_ref=self.use_single_ref)
        return {f"lexical/rouge_{rouge_type}": (scores, mean(scores)) for rouge_type, scores in by_type.items()}


class RougeLMax(rouge_l_max.RougeLMax, ScoreMetric):
    """ROUGE-L as py-rouge defines it, against the best reference, from 0 to 1, of each text and on average."""

    keys = ("lexical/rouge_l_max",)


class BLEUMetric(Bleu, ScoreMetric):
    """BLEU-4, from 0 to 1, of each text and of the corpus, which is not the mean over texts."""

    keys = ("lexical/bleu",)


class SacreBLEUMetric(SacreBleuScore, ScoreMetric):
    """BLEU by sacrebleu, from 0 to 1, of each text and of the corpus, which is not the mean over texts."""

    keys = ("lexical/sacrebleu",)


class TERMetric(TranslationEditRate, ScoreMetric):
    """Translation edit rate (lower is better) of each text and of the corpus, where long references weigh more."""

    keys = ("lexical/ter",)


class chrFmetric(ChrF, ScoreMetric):  # noqa: N801 - RL4LMs' name
    """chrF, from 0 to 1, of each text and of the corpus, from the summed counts."""

    keys = ("lexical/chrf",)
