"""Pool of dialogues without data: numbered episodes, whose environment draws everything from its seed."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Interval

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.splits import names_of


class NumberedEpisodes(TextGenPool):
    """Samples with a number and nothing else. A training episode differs from others by its seed, not by its number."""

    @classmethod
    def prepare(cls, split: str, eval_episodes: Annotated[int, Interval(ge=0, le=1_000_000)] = 100) -> NumberedEpisodes:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`.
            eval_episodes: number of episodes of `val` and of `test`.
        """
        names_of(split)
        n_episodes = 1 if split == "train" else eval_episodes
        return cls([Sample(f"{split}_{number}", "") for number in range(n_episodes)])
