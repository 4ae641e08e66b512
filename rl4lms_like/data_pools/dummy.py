"""Pool for tests and for tasks in which every episode has the same prompt."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Interval

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool


class DummyPool(TextGenPool):
    """One prompt, repeated, in every split."""

    @classmethod
    def prepare(
        cls, split: str, prompt: str, n_samples: Annotated[int, Interval(ge=1, le=1_000_000)] = 100
    ) -> DummyPool:
        """Build the pool of a split.

        Args:
            split: `train`, `val` or `test`; all splits are equal.
            prompt: the prompt of every sample.
            n_samples: number of samples.
        """
        return cls([Sample(str(index), prompt) for index in range(n_samples)])


TestTextGenPool = DummyPool  # RL4LMs' name
