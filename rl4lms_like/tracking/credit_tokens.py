"""One recorded token as the report shows it: visible text, a level of colour for each quantity, its numbers in words.

    numbers    {"advantages": 1.3, "kl": -0.02, ...}
    levels     -5 ... 5, each twice as far from the middle as the one before; 0 is the middle
    classes    `a3 k-1`: advantage level 3, KL level -1; a style sheet makes them colours

Advantages, KL and rewards have long tails: with even steps a few tokens would have all the colour.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.record import number

LEVELS = 5
"""Colours on each side of the middle."""
COVERED = 0.98
"""Share of the tokens that the scale reaches over; the others have its outermost colours."""
END, LINE_BREAK, TAB, PART = "■", "↵", "⇥", "▫"
CLIPPED = "clipped"
CUT_LEVEL, OUT_LEVEL = 5, 2
_CLIPPING = ((-5, "cut below"), (-2, "below, not cut"), (0, "within"), (2, "above, not cut"), (5, "cut above"))
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_WITHOUT_WIDTH = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]+")
"""Joiners, marks of direction, variants: with other characters they do something, alone there is nothing to see."""

Numbers: TypeAlias = "Mapping[str, float | None]"
"""A token's numbers by the names of the lists that they come from."""


@dataclass(frozen=True)
class Quantity:
    """What tokens can be coloured by.

    Args:
        key: first letter of its classes.
        name: on its button.
        field: the list of an episode that it stands in.
        note: what the colours mean.
        is_ratio: its middle is 1, and twice is as far as half; otherwise the middle is 0.
    """

    key: str
    name: str
    field: str
    note: str
    is_ratio: bool = False

    def place(self, value: float | None) -> float | None:
        """How far from the middle, with its sign; None where there is no number."""
        if value is None or not self.is_ratio:
            return value
        return math.log(value) if value > 0 else -math.inf if value == 0 else None


QUANTITIES = (
    Quantity("a", "Advantage", "advantages", "blue: the update pushes the token's probability up, orange: down"),
    Quantity("k", "KL", "kl", "nats; blue: more probable than under the reference, orange: less"),
    Quantity("r", "Ratio", "ratios", "the token's probability after the update over that before it", True),
    Quantity("c", "Clipping", CLIPPED, "underlined: PPO's surrogate cuts the gradient, the ratio is out of its range"),
    Quantity("w", "Reward", "rewards", "what the token was paid, the KL penalty included"),
)


@dataclass(frozen=True)
class Scale:
    """From numbers to levels; `step` is how far level 1 is from the middle, of a ratio in its logarithm."""

    quantity: Quantity
    step: float

    @classmethod
    def over(cls, quantity: Quantity, values: Iterable[Any]) -> Scale:
        """The scale whose outermost level covers most of `values`; `step` is a round number."""
        places = (quantity.place(number(value)) for value in values)
        sizes = sorted(abs(place) for place in places if place and math.isfinite(place))
        if not sizes:
            return cls(quantity, 1.0)
        wanted = sizes[min(int(COVERED * len(sizes)), len(sizes) - 1)] / 2 ** (LEVELS - 1)
        power = 10.0 ** math.floor(math.log10(wanted))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))
        return cls(quantity, step)

    def level(self, value: float | None) -> int:
        """-5 to 5: the nearest one, counted in doublings."""
        place = self.quantity.place(value)
        if not place:
            return 0
        size = round(math.log2(abs(place) / self.step)) + 1 if math.isfinite(place) else LEVELS
        return int(math.copysign(max(0, min(LEVELS, size)), place))

    @property
    def legend(self) -> list[tuple[int, str]]:
        """Every level with its number; the ends are open."""
        if self.quantity.field == CLIPPED:
            return list(_CLIPPING)
        sizes = [self.step * 2**power for power in range(LEVELS)]
        places = [*(-size for size in reversed(sizes)), 0.0, *sizes]
        digits = max(2, -math.floor(math.log10(self.step)))
        words = [_factor(math.exp(place), digits) if self.quantity.is_ratio else signed(place) for place in places]
        words[0], words[-1] = f"≤ {words[0]}", f"≥ {words[-1]}"
        return list(zip(range(-LEVELS, LEVELS + 1), words, strict=True))


def classes_of(numbers: Numbers, scales: Iterable[Scale], clip_range: float | None) -> str:
    """Levels other than 0; `cut` where the gradient is cut, `out` where only the ratio is out of its range."""
    levels = {scale.quantity.key: scale.level(numbers.get(scale.quantity.field)) for scale in scales}
    words = []
    ratio, cut = numbers.get("ratios"), numbers.get(CLIPPED)
    if cut:
        words.append("cut")
        levels["c"] = CUT_LEVEL if cut > 0 else -CUT_LEVEL
    elif ratio is not None and clip_range is not None and abs(ratio - 1) > clip_range:
        words.append("out")
        levels["c"] = OUT_LEVEL if ratio > 1 else -OUT_LEVEL
    return " ".join([*words, *(f"{key}{level}" for key, level in levels.items() if level)])


def visible(text: str) -> str:
    """Line breaks and tabs with a sign before them; lone spaces, and characters that cannot be seen, as signs."""
    if text and not text.strip(" \u00a0\u3000"):
        return "␣" * len(text)
    if _WITHOUT_WIDTH.fullmatch(text):
        return PART
    text = text.replace("\r\n", "\n").replace("\n", f"{LINE_BREAK}\n").replace("\t", f"{TAB}\t")
    return _NOT_SHOWN.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else PART, text)


# --- numbers in words ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A number of a token in words, made of the lists of these names."""

    name: str
    needs: tuple[str, ...]
    words: Callable[[Numbers], str]

    def fits(self, episode: Mapping[str, Any]) -> bool:
        """Whether the episode has those lists."""
        return all(name in episode for name in self.needs)


def signed(value: float | None) -> str:
    """With a sign, unless it is 0 or there is none."""
    return f"+{format_number(value)}" if value is not None and value > 0 else format_number(value)


def _factor(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if 1e-3 < value < 1e3 else format_number(value)


def _plain(name: str) -> Callable[[Numbers], str]:
    return lambda numbers: format_number(numbers[name])


def _signed(name: str) -> Callable[[Numbers], str]:
    return lambda numbers: signed(numbers[name])


def _after(numbers: Numbers) -> str:
    before, ratio = numbers["probs"], numbers["ratios"]
    return format_number(None if before is None or ratio is None else before * ratio)


def _gradient(numbers: Numbers) -> str:
    cut = numbers[CLIPPED]
    return "" if not cut else "cut above" if cut > 0 else "cut below"


COLUMNS = (
    Column("advantage", ("advantages",), _signed("advantages")),
    Column("return", ("returns",), _signed("returns")),
    Column("value", ("values",), _signed("values")),
    Column("probability", ("probs",), _plain("probs")),
    Column("after the update", ("probs", "ratios"), _after),
    Column("ratio", ("ratios",), _plain("ratios")),
    Column("gradient", (CLIPPED,), _gradient),
    Column("KL", ("kl",), _signed("kl")),
    Column("reward", ("rewards",), _signed("rewards")),
    Column("KL penalty in it", ("kl_rewards",), _signed("kl_rewards")),
    Column("allowed tokens", ("n_allowed",), _plain("n_allowed")),
)
