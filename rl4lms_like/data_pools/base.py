"""Base class of data pools, which provide the prompts."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from rl4lms_like.core.sample import Sample


class TextGenPool(ABC):
    """Samples of one split.

    `pool[i]` is `(sample, weight)`; the prompt sampler uses the weight as priority. It is 1 in this class.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = list(samples)

    @classmethod
    @abstractmethod
    def prepare(cls, split: str, *args: Any, **kwargs: Any) -> TextGenPool:
        """Build the pool of a split, `train`, `val` or `test`; further arguments come from the config."""

    @classmethod  # noqa: B027  (optional for subclasses)
    def require(cls, needed_by: str, **args: Any) -> None:
        """Check that the packages and resources of `prepare` are installed; most pools need none.

        Args:
            needed_by: description of the pool for messages.
            args: the arguments of `prepare`, without the split.

        Raises:
            RL4LMsLikeError: a package or resource is missing.
        """

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return True if `prepare` needs no network; the command `check` prepares only such pools.

        Args:
            args: the arguments of `prepare`, without the split.
        """
        return True

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Sample, float]:
        return self._samples[index], 1.0

    def __iter__(self) -> Iterator[tuple[Sample, float]]:
        return (self[index] for index in range(len(self)))

    @property
    def samples(self) -> list[Sample]:
        """Samples without weights."""
        return list(self._samples)

    def sample(self, rng: random.Random | None = None) -> Sample:
        """Draw one sample uniformly."""
        return (rng or random).choice(self._samples)

    def split(self, split_ratios: Sequence[float]) -> list[TextGenPool]:
        """Split the pool into consecutive slices of `floor(ratio * len)` samples each.

        Raises:
            ValueError: the ratios are negative or add up to more than 1.
        """
        if min(split_ratios) < 0 or sum(split_ratios) > 1 + 1e-9:
            raise ValueError(f"split ratios must be at least 0 and add up to at most 1, got {list(split_ratios)}")
        pools, start = [], 0
        for ratio in split_ratios:
            stop = start + int(ratio * len(self) + 1e-9)
            pools.append(type(self)(self._samples[start:stop]))
            start = stop
        return pools
