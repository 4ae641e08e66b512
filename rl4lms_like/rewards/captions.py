"""Rewards for captions and other single sentences about a scene."""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.numbers import Finite, Positive
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.cider import cider, existing_file, frequencies_of_file, require_cider
from rl4lms_like.scoring.spice import require_spice, spice


class SpiderRewardFunction(TextReward):
    """SPICE and CIDEr-D of the text against all references: `spice_coeff * SPICE + cider_coeff * CIDEr`.

    A part whose coefficient is 0 is neither computed nor needed. CIDEr needs to know how rare words are. With
    `references_file` it is told, and a text gets the same reward alone and in any batch. Without it the references of
    the batch decide, as in RL4LMs: rewards then depend on what else is scored, samples drawn twice count twice, and one
    text alone would always get 0, which is an error here (a batch is what `env.n_envs` episodes end with; with
    `env.reward_workers`, a worker's share of it).

    Args:
        spice_coeff: weight of SPICE, which is from 0 to 1.
        cider_coeff: weight of CIDEr-D, which is from 0 to 10.
        references_file: where document frequencies come from: `.jsonl`, a line being the references of one sample
            (text, a list, or an object with `references`), or plain text with one reference a line.
        java_memory: the most memory that SPICE's Java may take.
        timeout: seconds after which a run of SPICE is stopped.
    """

    needs_references = True

    def __init__(
        self,
        spice_coeff: Finite,
        cider_coeff: Finite,
        references_file: str | None = None,
        java_memory: str = "8G",
        timeout: Positive = 1800.0,
    ) -> None:
        self.spice_coeff = spice_coeff
        self.cider_coeff = cider_coeff
        self.references_file = references_file
        self.java_memory = java_memory
        self.timeout = timeout
        if spice_coeff:
            require_spice("the reward 'spider'")
        if cider_coeff:
            require_cider("the reward 'spider'")
        if references_file is not None:
            existing_file(references_file)

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        for prompt, references in zip(prompt_texts, ref_texts, strict=True):
            if not references:
                raise ValueError(f"the sample with the prompt {prompt[:60]!r} has no reference")
        rewards = [0.0] * len(gen_texts)
        for coefficient, score in ((self.cider_coeff, self._cider), (self.spice_coeff, self._spice)):
            if coefficient:
                parts = score(gen_texts, ref_texts)
                rewards = [reward + coefficient * part for reward, part in zip(rewards, parts, strict=True)]
        return rewards

    def _cider(self, gen_texts: list[str], ref_texts: list[list[str]]) -> list[float]:
        if self.references_file is not None:
            return cider(gen_texts, ref_texts, frequencies_of_file(self.references_file))
        if len(gen_texts) == 1:
            raise ValueError(
                "CIDEr of one text alone is always 0, since its own references are then all that is known of how rare "
                "words are; name a file of references in `references_file`, or score several texts together "
                "(env.n_envs above 1, env.reward_workers 0)"
            )
        return cider(gen_texts, ref_texts)

    def _spice(self, gen_texts: list[str], ref_texts: list[list[str]]) -> list[float]:
        return spice(gen_texts, ref_texts, java_memory=self.java_memory, timeout=self.timeout)
