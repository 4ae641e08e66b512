"""A shop: the model is the seller, and a scripted customer wants one thing."""

from __future__ import annotations

import re
from typing import Any

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.games.base import Step, TextGame
from rl4lms_like.system.numbers import Count, NonNegative

VALUES = {
    "size": ("small", "medium", "large"),
    "colour": ("red", "blue", "green", "black"),
    "item": ("hat", "coat", "shirt"),
}
"""Things that the shop sells: each item in each size and each colour."""

_WORD = re.compile(r"[a-z]+")


class Shop(TextGame):
    """A shop, whose seller the model is.

    The customer wants an item, a size and a colour, drawn uniformly; if the sample has a reference such as `small red
    hat`, it is what is wanted. The first text has the item, and size and colour each in half of the episodes. A turn of
    the seller with a question mark is a question: the customer answers the first of the words `size`, `colour` (or
    `color`) and `item` in it. Without a question mark, a turn that names one item, one size and one colour is an offer:
    the right one is bought, and of a wrong one the customer says what is not as wanted. Everything else is not
    understood. After `patience` wrong offers the customer leaves.

    Score: 1 for the sale, minus `question_cost` for each question and each turn that is not understood, minus
    `offer_cost` for each wrong offer.

        player          score
        best possible   .9: asks for what the customer has not said, one question on average, and offers it
        scripted        .75

    The scripted player knows the words, but is forgetful and hasty: in 2 of 10 turns it asks for the item, which was
    said, and in 3 of 10 of the others it makes an offer with random values for what the customer has not said.

    Metrics: `sold`, `questions`, `wrong_offers`.

    Args:
        question_cost: points of a question.
        offer_cost: points of a wrong offer.
        patience: number of wrong offers after which the customer leaves.
    """

    def __init__(self, question_cost: NonNegative = 0.1, offer_cost: NonNegative = 0.3, patience: Count = 3) -> None:
        self.question_cost = question_cost
        self.offer_cost = offer_cost
        self.patience = patience

    def start(self, sample: Sample | None) -> str:
        """Return what the customer says first; see `TextGame.start`.

        Raises:
            ValueError: the reference of the sample does not name one item, one size and one colour.
        """
        self.wanted: dict[str, str] = {}
        for slot, values in VALUES.items():
            self.wanted[slot] = values[int(self.np_random.integers(len(values)))]
        is_said = self.np_random.random(2) < 0.5

        # After the draws: the first text of a seed mentions the same slots with and without a reference.
        if sample is not None:
            offer = offered(sample.references[0])
            if offer is None:
                raise ValueError(f"the reference {sample.references[0]!r} does not name one item, size and colour")
            self.wanted = offer

        # Values that the customer has mentioned, all that the seller can know: the item always, the others by chance.
        self.said = {"item": self.wanted["item"]}
        for slot, is_mentioned in zip(("size", "colour"), is_said, strict=True):
            if is_mentioned:
                self.said[slot] = self.wanted[slot]
        self._metrics = {"sold": 0.0, "questions": 0.0, "wrong_offers": 0.0}

        words = [self.said[slot] for slot in VALUES if slot in self.said]
        return f"I want a {' '.join(words)}.\n"

    def step(self, action: str) -> Step:
        """Answer the seller."""
        if "?" in action:
            return self._asked(action)

        # Without a question mark, a turn is an offer or not understood.
        offer = offered(action)
        if offer is None:
            return self._continued("Pardon?", -self.question_cost)
        if offer == self.wanted:
            self._metrics["sold"] = 1.0
            return "Thank you.\n", 1.0, True, False, {"metrics": dict(self._metrics)}

        self._metrics["wrong_offers"] += 1
        if self._metrics["wrong_offers"] >= self.patience:
            return "Goodbye.\n", -self.offer_cost, True, False, {"metrics": dict(self._metrics)}
        wrong = [offer[slot] for slot in VALUES if offer[slot] != self.wanted[slot]]
        return self._continued(f"Not {' and not '.join(wrong)}.", -self.offer_cost)

    def _asked(self, question: str) -> Step:
        self._metrics["questions"] += 1
        for word in _WORD.findall(question.lower()):
            slot = "colour" if word == "color" else word
            if slot in VALUES:
                self.said[slot] = self.wanted[slot]
                return self._continued(f"{self.wanted[slot]}", -self.question_cost)
        return self._continued("Pardon?", -self.question_cost)

    def _continued(self, answer: str, reward: float) -> Step:
        return f"{answer}\n", reward, False, False, {"metrics": dict(self._metrics)}

    def player(self) -> str:
        """Return a question or an offer; see the description of the class."""
        if self.player_random.random() < 0.2:
            return "item?"
        unknown = [slot for slot in VALUES if slot not in self.said]
        if unknown and self.player_random.random() >= 0.3:
            return f"{unknown[0]}?"
        offer: dict[str, Any] = {}
        for slot, values in VALUES.items():
            offer[slot] = self.said.get(slot, self.player_random.choice(values))
        return " ".join(offer.values())


def offered(text: str) -> dict[str, str] | None:
    """Return the size, colour and item that a text names; None if it does not name exactly one of each.

    Examples:
        >>> offered("Here is a red hat, size small.")
        {'size': 'small', 'colour': 'red', 'item': 'hat'}
        >>> offered("a red or blue hat, small") is None
        True
    """
    words = set(_WORD.findall(text.lower()))
    offer = {}
    for slot, values in VALUES.items():
        named = [value for value in values if value in words]
        if len(named) != 1:
            return None
        offer[slot] = named[0]
    return offer
