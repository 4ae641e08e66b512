"""Rewards for word and character overlap with the references; the scores are those of the metrics with the same ids."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.bleu import Bleu
from rl4lms_like.scoring.meteor import Meteor
from rl4lms_like.scoring.rouge import RougeType, require_rouge, rouge
from rl4lms_like.scoring.rouge_l_max import RougeLMax
from rl4lms_like.scoring.score import Texts
from rl4lms_like.scoring.translation import ChrF, SacreBleuScore, TranslationEditRate


class MeteorRewardFunction(Meteor, ScoreReward):
    """METEOR against the best reference, from 0 to 1."""


@dataclass(eq=False)
class RougeRewardFunction(ScoreReward):
    """ROUGE F-measure with stemming, from 0 to 1.

    Args:
        rouge_type: unigrams, bigrams, longest common subsequence, or longest common subsequence per line.
        use_single_ref: compare with the first reference; False: with the best.
    """

    id = "rouge"
    needs_references = True

    rouge_type: RougeType
    use_single_ref: bool = True

    def __post_init__(self) -> None:
        require_rouge(self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        (scores,) = rouge(
            texts.responses, texts.references, (self.rouge_type,), use_single_ref=self.use_single_ref
        ).values()
        return scores


class RougeCombined(ScoreReward):
    """Mean of rouge1, rouge2 and rougeL against the first reference, from 0 to 1."""

    id = "rouge_combined"
    needs_references = True

    def __init__(self) -> None:
        require_rouge(self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        scores = rouge(texts.responses, texts.references, ("rouge1", "rouge2", "rougeL"))
        return [sum(three) / 3 for three in zip(*scores.values(), strict=True)]


class RougeLMaxRewardFunction(RougeLMax, ScoreReward):
    """ROUGE-L as py-rouge defines it, against the best reference, from 0 to 1."""


class BLEURewardFunction(Bleu, ScoreReward):
    """Sentence BLEU-4 from 0 to 1: whitespace tokens, all references, no smoothing (0 without a common 4-gram)."""


class SacreBleu(SacreBleuScore, ScoreReward):
    """Sentence BLEU by sacrebleu, from 0 to 1."""


class TER(TranslationEditRate, ScoreReward):
    """1 minus the translation edit rate: 1 for an exact match, negative if edits outnumber the reference's words."""

    def per_text(self, texts: Texts) -> list[float]:
        return [1 - rate for rate in super().per_text(texts)]


class chrF(ChrF, ScoreReward):  # noqa: N801 - RL4LMs' name
    """chrF against the best reference, from 0 to 1."""
