"""Rewards for texts about tables."""

from __future__ import annotations

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.parent import parent, require_parent
from rl4lms_like.scoring.score import Texts
from rl4lms_like.scoring.totto import totto_samples


class PARENTRewardFunction(ScoreReward):
    """PARENT F-score of the text against its ToTTo table and the table's sentences, from 0 to 1.

    The references are those in `meta_data["raw_table"]`, as provided by the data pool `totto`.
    """

    id = "parent"

    def __init__(self) -> None:
        require_parent(self.needed_by)

    def per_text(self, texts: Texts) -> list[float]:
        samples = totto_samples(texts.metas, self.needed_by)
        for index, sample in enumerate(samples):
            if not sample.n_written:
                raise ValueError(f"the table of text {index} has no final sentence to compare with (a test split?)")
        return [score.f_score for score in parent(texts.responses, samples)]
