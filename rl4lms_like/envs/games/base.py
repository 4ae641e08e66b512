"""Base class of the games: spaces, the sample and the random numbers that all of them share."""

from __future__ import annotations

import string
from abc import abstractmethod
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from rl4lms_like.core.sample import Sample

Step: TypeAlias = "tuple[str, float, bool, bool, dict[str, Any]]"
"""Answer, reward, terminated, truncated and info of one turn."""

_LONGEST_TEXT = 100_000


class TextGame(gymnasium.Env[str, str]):
    """Game over texts whose episodes are determined by the seed and the sample.

    A subclass defines `start` and `step`. Each text of it ends with a line break, so that the next turn of a model
    without chat template begins on a line of its own.
    """

    observation_space = spaces.Text(_LONGEST_TEXT, min_length=0, charset=string.printable)
    action_space = spaces.Text(_LONGEST_TEXT, min_length=0, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seed of the episode; without one, the random numbers of the last episode are continued.
            options: `sample`, whose first reference (if there is one) replaces what would be drawn.

        Returns:
            The text of the first turn, and an empty `info`.
        """
        super().reset(seed=seed)

        # A generator of its own for the scripted player: an episode is the same whether or not that player is asked.
        self.player_random = np.random.default_rng(int(self.np_random.integers(2**32)))
        sample = (options or {}).get("sample")
        return self.start(sample if sample is not None and sample.references else None), {}

    @abstractmethod
    def start(self, sample: Sample | None) -> str:
        """Return the text of the first turn of a new episode.

        Args:
            sample: sample with a reference; None to draw from `self.np_random`.
        """

    @abstractmethod
    def player(self) -> str:
        """Return what a scripted player would write next."""
