"""Reproducible random numbers from one seed, without global state.

Each part of a run that samples has its own `SeedStream`. Its k-th seed depends only on the run's seed, its purpose and
k. Therefore one part never changes the random numbers of another part, and saving k saves the stream.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def derived_seed(seed: int, purpose: str, *counters: int) -> int:
    """Return a 32-bit seed from a run's seed, a purpose and counters; the same in every process and on every machine.

    Examples:
        >>> derived_seed(1, "rollout", 0) == derived_seed(1, "rollout", 0)
        True
        >>> derived_seed(1, "rollout", 0) == derived_seed(1, "rollout", 1)
        False
    """
    # CRC-32, because Python's `hash` of a string differs between processes. SeedSequence mixes the numbers, so that
    # seeds 0 and 1, or counters 0 and 1, give unrelated random numbers; it takes no negative ones.
    entropy = [seed & 0xFFFFFFFF, zlib.crc32(purpose.encode()), *counters]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


class SeedStream:
    """Endless sequence of seeds for one purpose.

    Args:
        seed: the run's seed.
        purpose: a name, different for each part that samples.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        self.seed = seed
        self.purpose = purpose
        self.drawn = 0

    def next(self) -> int:
        """Return the next 32-bit seed."""
        value = derived_seed(self.seed, self.purpose, self.drawn)
        self.drawn += 1
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the run's seed and the number of seeds drawn."""
        return {"seed": self.seed, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.seed = state["seed"]
        self.drawn = state["drawn"]
