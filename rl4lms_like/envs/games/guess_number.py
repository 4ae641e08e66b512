"""A number to guess: each wrong guess is answered with higher or lower."""

from __future__ import annotations

import re

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.games.base import Step, TextGame
from rl4lms_like.system.numbers import Count, NonNegative

_NUMBER = re.compile(r"[0-9]+")
_LONGEST_NUMBER = 18
"""Digits of the longest guess that is read as a number."""


class GuessNumber(TextGame):
    """A number to guess.

    The number is drawn uniformly from 1 to `high`; if the sample has a reference, it is the number. A turn is a guess:
    the first number in its text. A wrong guess is answered with `higher` or `lower`, and a text without a number loses.

    Score: 1 for the right guess minus `cost` for each wrong one; minus 1 for a text without a number. With m turns on
    average, a player who always wins scores 1 - cost (m - 1). The best player halves the possible numbers: m is 2.43
    for `high` 7 and 3.27 for 15. The scripted player guesses one of the possible numbers at random: m is
    2 (1 + 1 / high) H - 3 with the harmonic number H of `high`, 2.93 for 7 and 4.08 for 15.

        player                  turns for 7   score for 7   turns for 15   score for 15
        best possible           2.43          .857          3.27           .773
        scripted                2.93          .807          4.08           .692

    Metrics: `won`.

    Args:
        high: the number is from 1 to this.
        cost: points of a wrong guess.
    """

    def __init__(self, high: Count = 15, cost: NonNegative = 0.1) -> None:
        self.high = high
        self.cost = cost

    def start(self, sample: Sample | None) -> str:
        """Return the question; see `TextGame.start`.

        Raises:
            ValueError: the reference of the sample is no number from 1 to `high`.
        """
        drawn = int(self.np_random.integers(1, self.high + 1))
        self.number = drawn if sample is None else self._number_of(sample)

        # Numbers that are possible after the answers so far, both included.
        self.lowest = 1
        self.highest = self.high
        return f"Guess a number from 1 to {self.high}:\n"

    def _number_of(self, sample: Sample) -> int:
        reference = sample.references[0].strip()
        if _NUMBER.fullmatch(reference) and 1 <= int(reference) <= self.high:
            return int(reference)
        raise ValueError(f"the reference {reference!r} is no number from 1 to {self.high}")

    def step(self, action: str) -> Step:
        """Answer a guess."""
        match = _NUMBER.search(action)
        if match is None or len(match[0]) > _LONGEST_NUMBER:
            return "That is no number.\n", -1.0, True, False, {"metrics": {"won": 0.0}}

        guess = int(match[0])
        if guess == self.number:
            return "correct\n", 1.0, True, False, {"metrics": {"won": 1.0}}

        # A wrong guess narrows the numbers among which the scripted player chooses.
        metrics = {"won": 0.0}
        if guess < self.number:
            self.lowest = max(self.lowest, guess + 1)
            return "higher\n", -self.cost, False, False, {"metrics": metrics}
        self.highest = min(self.highest, guess - 1)
        return "lower\n", -self.cost, False, False, {"metrics": metrics}

    def player(self) -> str:
        """Return one of the numbers that are still possible, drawn uniformly."""
        return str(self.player_random.integers(self.lowest, self.highest + 1))
