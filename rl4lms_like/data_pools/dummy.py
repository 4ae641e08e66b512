"""A pool for tests and for tasks where every episode starts alike."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Interval

from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool


class DummyPool(TextGenPool):
    """One prompt, many times, in every split."""

    @classmethod
    def prepare(
        cls, split: str, prompt: str, n_samples: Annotated[int, Interval(ge=1, le=1_000_000)] = 100
    ) -> DummyPool:
        """Builds the pool of a split.

        Args:
            split: `train`, `val` or `test`; all are alike.
            prompt: the prompt of every sample.
            n_samples: how many.
        """
        return cls([Sample(str(index), prompt) for index in range(n_samples)])


TestTextGenPool = DummyPool
"""RL4LMs' name."""
