"""Rewards for captions and other single sentences about a scene."""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.numbers import Finite, Positive
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.cider import cider, existing_file, frequencies_of_file, require_cider
from rl4lms_like.scoring.spice import require_spice, spice


class SpiderRewardFunction(TextReward):
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
                "CIDEr of a single text is always 0, because the document frequencies then come from its own "
                "references only; set `references_file`, or score several texts together "
                "(env.n_envs above 1, env.reward_workers 0)"
            )
        return cider(gen_texts, ref_texts)

    def _spice(self, gen_texts: list[str], ref_texts: list[list[str]]) -> list[float]:
        return spice(gen_texts, ref_texts, java_memory=self.java_memory, timeout=self.timeout)
