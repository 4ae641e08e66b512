"""Rewards for word and character overlap with the references. Metrics with the same ids call the same functions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from rl4lms_like.core.numbers import NonNegative, Positive, Share, Whole
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.bleu import bleu
from rl4lms_like.scoring.meteor import meteor, require_meteor
from rl4lms_like.scoring.references import require_references
from rl4lms_like.scoring.rouge import RougeType, require_rouge, rouge, rouge_combined
from rl4lms_like.scoring.rouge_l_max import RougeLSettings, require_rouge_l_max, rouge_l_max
from rl4lms_like.scoring.translation import SacreBleuSettings, SmoothMethod, chrf, require_sacrebleu, sacre_bleu, ter


class ReferenceReward(TextReward):
    """Reward that compares finished responses with their references; a sample without references is an error."""

    needs_references = True

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> Sequence[float]:
        require_references(prompt_texts, ref_texts)
        return self.compare(gen_texts, ref_texts)

    @abstractmethod
    def compare(self, generated_texts: list[str], references: list[list[str]]) -> Sequence[float]:
        """Return one score per text; every sample has at least one reference."""


class MeteorRewardFunction(ReferenceReward):
    """METEOR against the best reference, from 0 to 1."""

    def __init__(self) -> None:
        require_meteor("the reward 'meteor'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        return meteor(generated_texts, references)


class RougeRewardFunction(ReferenceReward):
    """ROUGE F-measure with stemming, from 0 to 1.

    Args:
        rouge_type: unigrams, bigrams, longest common subsequence, or longest common subsequence per line.
        use_single_ref: compare with the first reference; False: with the best.
    """

    def __init__(self, rouge_type: RougeType, use_single_ref: bool = True) -> None:
        require_rouge("the reward 'rouge'")
        self.rouge_type = rouge_type
        self.use_single_ref = use_single_ref

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        scores = rouge(generated_texts, references, (self.rouge_type,), use_single_ref=self.use_single_ref)
        return scores[self.rouge_type]


class RougeCombined(ReferenceReward):
    """Mean of rouge1, rouge2 and rougeL against the first reference, from 0 to 1."""

    def __init__(self) -> None:
        require_rouge("the reward 'rouge_combined'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        return rouge_combined(generated_texts, references)


class RougeLMaxRewardFunction(ReferenceReward):
    """ROUGE-L as py-rouge defines it, against the best reference, from 0 to 1.

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
        require_rouge_l_max(self.settings, "the reward 'rouge_l_max'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        return rouge_l_max(generated_texts, references, self.settings)


class BLEURewardFunction(ReferenceReward):
    """Sentence BLEU-4 from 0 to 1: whitespace tokens, all references, no smoothing (0 without a common 4-gram)."""

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        return bleu(generated_texts, references).texts


class SacreBleu(ReferenceReward):
    """Sentence BLEU by sacrebleu, from 0 to 1.

    Args:
        smooth_method: smoothing of n-gram orders without a match.
        smooth_value: parameter of the methods `floor` (default 0.1) and `add-k` (default 1).
        force: has no effect, because sacrebleu's warning about tokenized text is never printed.
        lowercase: compare in lower case.
        tokenize: `13a` (also for null), `intl`, `zh`, `char`, `none` ...
        use_effective_order: ignore n-gram orders that are longer than the text.
    """

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
        require_sacrebleu("the reward 'sacre_bleu'", self.settings)

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        return [score / 100 for score in sacre_bleu(generated_texts, references, self.settings).texts]


class TER(ReferenceReward):
    """1 minus the translation edit rate: 1 for an exact match, negative if edits outnumber the reference's words."""

    def __init__(self) -> None:
        require_sacrebleu("the reward 'ter'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        return [1 - score / 100 for score in ter(generated_texts, references).texts]


class chrF(ReferenceReward):  # noqa: N801 - RL4LMs' name
    """chrF against the best reference, from 0 to 1."""

    def __init__(self) -> None:
        require_sacrebleu("the reward 'chrf'")

    def compare(self, generated_texts: list[str], references: list[list[str]]) -> list[float]:
        return [score / 100 for score in chrf(generated_texts, references).texts]
