"""Rewards for overlap with references, tables and scenes; the scores are those of the metrics with the same ids."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.bleu import Bleu
from rl4lms_like.scoring.captions import cider, frequencies_of_file, require_spice, spice
from rl4lms_like.scoring.meteor import Meteor
from rl4lms_like.scoring.rouge import RougeLMaxScore, RougeType, require_rouge, rouge
from rl4lms_like.scoring.score import Texts, existing_file
from rl4lms_like.scoring.totto import parent, totto_samples
from rl4lms_like.scoring.translation import ChrF, SacreBleuScore, TranslationEditRate
from rl4lms_like.system.errors import import_extra
from rl4lms_like.system.numbers import Finite, Positive


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
        by_type = rouge(
            texts.responses, texts.references, rouge_types=(self.rouge_type,), use_single_ref=self.use_single_ref
        )
        return by_type[self.rouge_type]


class RougeCombined(ScoreReward):
    """Mean of rouge1, rouge2 and rougeL against the first reference, from 0 to 1."""

    id = "rouge_combined"
    needs_references = True

    def __init__(self) -> None:
        require_rouge(self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        by_type = rouge(texts.responses, texts.references, rouge_types=("rouge1", "rouge2", "rougeL"))
        return [sum(f_measures) / 3 for f_measures in zip(*by_type.values(), strict=True)]


class RougeLMaxRewardFunction(RougeLMaxScore, ScoreReward):
    """ROUGE-L as py-rouge defines it, against the best reference, from 0 to 1."""


class BLEURewardFunction(Bleu, ScoreReward):
    """Sentence BLEU-4 from 0 to 1: whitespace tokens, all references, no smoothing (0 without a common 4-gram)."""


class SacreBleu(SacreBleuScore, ScoreReward):
    """Sentence BLEU by sacrebleu, from 0 to 1."""


class TER(TranslationEditRate, ScoreReward):
    """1 minus the translation edit rate: 1 for an exact match, negative if edits outnumber the reference's words."""

    def per_text(self, texts: Texts) -> list[float]:
        # Edits are errors, so a reward is higher with fewer of them. No lower bound: the rate of long texts exceeds 1.
        return [1 - rate for rate in super().per_text(texts)]


class chrF(ChrF, ScoreReward):  # noqa: N801 - RL4LMs' name
    """chrF against the best reference, from 0 to 1."""


class PARENTRewardFunction(ScoreReward):
    """PARENT F-score of the text against its ToTTo table and the table's sentences, from 0 to 1.

    The references are those in `meta_data["raw_table"]`, as provided by the data pool `totto`.
    """

    id = "parent"

    def __init__(self) -> None:
        import_extra("sacrebleu", extra="lexical", needed_by=self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        samples = totto_samples(texts.metas, self.needed_by)

        # Without a sentence, PARENT is NaN: a metric leaves the sample out, a reward must have a number for it.
        for index, sample in enumerate(samples):
            if not sample.n_written:
                raise ValueError(f"the table of text {index} has no final sentence to compare with (a test split?)")

        return [score.f_score for score in parent(texts.responses, samples)]


@dataclass(eq=False)
class SpiderRewardFunction(ScoreReward):
    """Weighted sum of SPICE and CIDEr-D against all references: `spice_coeff * SPICE + cider_coeff * CIDEr`.

    A part whose coefficient is 0 is not computed, and its packages are not needed. CIDEr weights words by document
    frequency. With `references_file` the frequencies are fixed, and a text gets the same reward alone and in any batch.
    Without it they come from the references of the batch, as in RL4LMs. Rewards then depend on the other texts in the
    batch, samples drawn twice count twice, and a single text would always get 0, which is an error here. A batch is the
    final responses of `env.n_envs` episodes, or the part of them that one of `env.reward_workers` scores.

    Args:
        spice_coeff: weight of SPICE, which ranges from 0 to 1.
        cider_coeff: weight of CIDEr-D, which ranges from 0 to 10.
        references_file: source of the document frequencies: `.jsonl` with the references of one sample per line
            (text, a list, or an object with `references`), or plain text with one reference per line.
        java_memory: maximum memory of SPICE's Java process.
        timeout: seconds after which a SPICE run is stopped.
    """

    id = "spider"
    needs_references = True

    spice_coeff: Finite
    cider_coeff: Finite
    references_file: str | None = None
    java_memory: str = "8G"
    timeout: Positive = 1800.0

    def __post_init__(self) -> None:
        # What is missing is reported before a model is loaded, and only if the coefficient makes it necessary.
        if self.spice_coeff:
            require_spice(self.needed_by)
        if self.cider_coeff:
            import_extra("spacy", extra="captions", needed_by=self.needed_by)
        if self.references_file is not None:
            existing_file(self.references_file, "references_file")

    def per_text(self, texts: Texts) -> list[float]:
        rewards = [0.0] * len(texts.responses)

        # CIDEr first: its error about a single text comes before SPICE starts Java, which takes seconds.
        if self.cider_coeff:
            scores = self._cider(texts)
            rewards = [reward + self.cider_coeff * score for reward, score in zip(rewards, scores, strict=True)]

        if self.spice_coeff:
            scores = spice(texts.responses, texts.references, java_memory=self.java_memory, timeout=self.timeout)
            rewards = [reward + self.spice_coeff * score for reward, score in zip(rewards, scores, strict=True)]
        return rewards

    def _cider(self, texts: Texts) -> list[float]:
        if self.references_file is not None:
            return cider(texts.responses, texts.references, frequencies_of_file(self.references_file))

        # An n-gram of the only document has the weight log(1 / 1) = 0, so the reward could not tell texts apart.
        if len(texts.responses) == 1:
            raise ValueError(
                "CIDEr of a single text is always 0 if the document frequencies come from its own references; set "
                "`references_file`, or score several texts together (env.n_envs above 1, env.reward_workers 0)"
            )
        return cider(texts.responses, texts.references)
