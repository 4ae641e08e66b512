"""What a user subclasses to say where prompts come from."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from rl4lms_like.core.sample import Sample


class TextGenPool(ABC):
    """The samples of one split.

    `pool[i]` is `(sample, weight)`; the weight feeds the prompt sampler's priorities and is 1 here.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = list(samples)

    @classmethod
    @abstractmethod
    def prepare(cls, split: str, *args: Any, **kwargs: Any) -> TextGenPool:
        """Builds the pool of a split, `train`, `val` or `test`; its further arguments come from the config."""

    @classmethod  # noqa: B027  (no duty of subclasses)
    def require(cls, needed_by: str, **args: Any) -> None:
        """Says what `prepare` would lack, before anything is read; most pools lack nothing.

        Args:
            needed_by: the pool, in words.
            args: the arguments of `prepare`, without the split.

        Raises:
            RL4LMsLikeError: a package or resource is not here.
        """

    @classmethod
    def is_local(cls, **args: Any) -> bool:
        """Return whether `prepare` reads nothing from a network; `check` prepares such pools only.

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
        """The samples, without weights."""
        return list(self._samples)

    def sample(self, rng: random.Random | None = None) -> Sample:
        """One sample, drawn uniformly."""
        return (rng or random).choice(self._samples)

    def split(self, split_ratios: Sequence[float]) -> list[TextGenPool]:
        """Consecutive slices of `floor(ratio * len)` samples each.

        Raises:
            ValueError: if the ratios are negative or add up to more than 1.
        """
        if min(split_ratios) < 0 or sum(split_ratios) > 1 + 1e-9:
            raise ValueError(f"split ratios must be at least 0 and add up to at most 1, got {list(split_ratios)}")
        pools, start = [], 0
        for ratio in split_ratios:
            stop = start + int(ratio * len(self) + 1e-9)
            pools.append(type(self)(self._samples[start:stop]))
            start = stop
        return pools
