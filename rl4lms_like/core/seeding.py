"""Random numbers from one seed, without hidden global state.

Everything that draws owns a `SeedStream`: the k-th seed it gives depends on the run's seed, on what it is for, and on k
alone. So what one part draws never shifts what another part draws, and saving k saves the stream.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def derived_seed(seed: int, purpose: str, *counters: int) -> int:
    """A 32-bit seed from a run's seed, a purpose and counters; the same in every process and on every machine."""
    entropy = [seed & 0xFFFFFFFF, zlib.crc32(purpose.encode()), *counters]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


class SeedStream:
    """An endless series of seeds for one purpose.

    Args:
        seed: the run's seed.
        purpose: a name, different for each part that draws.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        self.seed = seed
        self.purpose = purpose
        self.drawn = 0

    def next(self) -> int:
        """The next seed, 32 bits."""
        value = derived_seed(self.seed, self.purpose, self.drawn)
        self.drawn += 1
        return value

    def state_dict(self) -> dict[str, Any]:
        """How many seeds have been given."""
        return {"seed": self.seed, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.seed, self.drawn = state["seed"], state["drawn"]
