"""Rewards for texts about tables."""

from __future__ import annotations

from typing import Any

from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.parent import parent, require_parent
from rl4lms_like.scoring.totto import totto_samples


class PARENTRewardFunction(TextReward):
    """PARENT F-score of the text against its ToTTo table and the table's sentences, from 0 to 1.

    The references are those in `meta_data["raw_table"]`, as provided by the data pool `totto`.
    """

    def __init__(self) -> None:
        require_parent("the reward 'parent'")

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        samples = totto_samples(meta_infos, "the reward 'parent'")
        for index, sample in enumerate(samples):
            if not sample.n_written:
                raise ValueError(f"the table of text {index} has no final sentence to compare with (a test split?)")
        return [score.f_score for score in parent(gen_texts, samples)]
