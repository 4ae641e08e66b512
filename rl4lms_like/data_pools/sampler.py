"""Sampler of prompts: draws with replacement, in proportion to `weight ** priority_scale`.

weights      1.0   3.0   0.5
cumulative   1.0   4.0   4.5     a draw is a random number below the total, located by bisection
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from rl4lms_like.core.errors import DataPoolError
from rl4lms_like.core.sample import Sample


class PrioritySampler:
    """Weighted sampler with its own random generator; O(log n) per draw.

    Args:
        items: samples, or pairs of sample and weight (a pool yields such pairs).
        priority_scale: exponent of the weights; 0 draws uniformly.
        seed: seed of the generator; default: from the operating system.

    Raises:
        DataPoolError: there are no items, no weight is above 0, or a weight is negative or not finite.
    """

    def __init__(
        self,
        items: Iterable[Sample | tuple[Sample, float]],
        priority_scale: float = 0.0,
        seed: int | None = None,
    ) -> None:
        pairs = [item if isinstance(item, tuple) else (item, 1.0) for item in items]
        self.samples: list[Sample] = [sample for sample, _ in pairs]
        self._cumulative = np.cumsum(_priorities([weight for _, weight in pairs], priority_scale))
        self._generator = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.samples)

    def seed(self, seed: int) -> None:
        """Seed the random generator."""
        self._generator = np.random.default_rng(seed)

    def draw(self) -> int:
        """Draw the index of the next sample."""
        place = self._generator.random() * self._cumulative[-1]
        return min(int(np.searchsorted(self._cumulative, place, side="right")), len(self) - 1)

    def sample(self, size: int = 1) -> list[Sample]:
        """Draw the next `size` samples."""
        return [self.samples[self.draw()] for _ in range(size)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random generator, in JSON types."""
        return {"n_samples": len(self), "generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`.

        Raises:
            DataPoolError: the state was saved with a different number of samples.
        """
        if state["n_samples"] != len(self):
            raise DataPoolError(
                f"the sampler's state belongs to a pool of {state['n_samples']} samples, this one has {len(self)}"
            )
        self._generator.bit_generator.state = state["generator"]


def _priorities(weights: list[float], scale: float) -> np.ndarray:
    if not weights:
        raise DataPoolError("there are no samples to draw prompts from")
    given = np.asarray(weights, dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(given) | (given < 0))
    if len(wrong):
        raise DataPoolError(f"weights must be finite and at least 0; sample {wrong[0]} has {weights[wrong[0]]}")
    priorities = given**scale
    if not 0 < priorities.sum() < np.inf:
        raise DataPoolError(f"no sample can be drawn: all weights to the power {scale} are 0, or their sum overflows")
    return priorities
