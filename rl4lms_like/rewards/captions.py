"""Rewards for captions and other single sentences about a scene."""

from __future__ import annotations

from dataclasses import dataclass

from rl4lms_like.core.numbers import Finite, Positive
from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.cider import cider, existing_file, frequencies_of_file, require_cider
from rl4lms_like.scoring.score import Texts
from rl4lms_like.scoring.spice import require_spice, spice


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
        if self.spice_coeff:
            require_spice(self.needed_by)
        if self.cider_coeff:
            require_cider(self.needed_by)
        if self.references_file is not None:
            existing_file(self.references_file)

    def per_text(self, texts: Texts) -> list[float]:
        rewards = [0.0] * len(texts.responses)
        for coefficient, score in ((self.cider_coeff, self._cider), (self.spice_coeff, self._spice)):
            if coefficient:
                rewards = [reward + coefficient * part for reward, part in zip(rewards, score(texts), strict=True)]
        return rewards

    def _cider(self, texts: Texts) -> list[float]:
        if self.references_file is not None:
            return cider(texts.responses, texts.references, frequencies_of_file(self.references_file))
        if len(texts.responses) == 1:
            raise ValueError(
                "CIDEr of a single text is always 0, because the document frequencies then come from its own "
                "references only; set `references_file`, or score several texts together "
                "(env.n_envs above 1, env.reward_workers 0)"
            )
        return cider(texts.responses, texts.references)

    def _spice(self, texts: Texts) -> list[float]:
        return spice(texts.responses, texts.references, java_memory=self.java_memory, timeout=self.timeout)
