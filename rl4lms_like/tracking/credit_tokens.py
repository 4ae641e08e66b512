"""Recorded tokens in the report: visible text, one colour level per quantity, formatted numbers.

    numbers    {"advantages": 1.3, "kl": -0.02, ...}
    levels     -5 ... 5; each level is twice as far from 0 as the one before
    classes    `a3 k-1`: advantage level 3, KL level -1; the style sheet maps them to colours

Levels are logarithmic because advantages, KL and rewards have long tails.
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
"""Number of colours on each side of the middle."""
COVERED = 0.98
"""Fraction of the tokens within the scale; the others get its outermost colours."""
END, LINE_BREAK, TAB, PART = "■", "↵", "⇥", "▫"
CLIPPED = "clipped"
CUT_LEVEL, OUT_LEVEL = 5, 2
_CLIPPING = ((-5, "cut below"), (-2, "below, not cut"), (0, "within"), (2, "above, not cut"), (5, "cut above"))
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_WITHOUT_WIDTH = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]+")
"""Joiners, direction marks and variation selectors, which are invisible on their own."""

Numbers: TypeAlias = "Mapping[str, float | None]"
"""Numbers of a token, by the names of the episode's lists."""


@dataclass(frozen=True)
class Quantity:
    """Quantity that determines the colour of tokens.

    Args:
        key: first letter of its CSS classes.
        name: label of its button.
        field: name of the episode's list with its values.
        note: meaning of the colours.
        is_ratio: use a logarithmic scale around 1; otherwise the scale is centred on 0.
    """

    key: str
    name: str
    field: str
    note: str
    is_ratio: bool = False

    def place(self, value: float | None) -> float | None:
        """Return the signed distance from the middle, or None if there is no number."""
        if value is None or not self.is_ratio:
            return value
        return math.log(value) if value > 0 else -math.inf if value == 0 else None


QUANTITIES = (
    Quantity("a", "Advantage", "advantages", "blue: the update pushes the token's probability up, orange: down"),
    Quantity("k", "KL", "kl", "nats; blue: more probable than under the reference, orange: less probable"),
    Quantity("r", "Ratio", "ratios", "the token's probability after the update over that before it", True),
    Quantity("c", "Clipping", CLIPPED, "underlined: PPO's gradient is zero, the ratio is outside the clip range"),
    Quantity("w", "Reward", "rewards", "reward of the token, including the KL penalty"),
)


@dataclass(frozen=True)
class Scale:
    """Mapping from numbers to levels; `step` is the distance of level 1 from the middle, for ratios in log space."""

    quantity: Quantity
    step: float

    @classmethod
    def over(cls, quantity: Quantity, values: Iterable[Any]) -> Scale:
        """Return the scale that covers most of `values`; `step` is a round number."""
        places = (quantity.place(number(value)) for value in values)
        sizes = sorted(abs(place) for place in places if place and math.isfinite(place))
        if not sizes:
            return cls(quantity, 1.0)
        wanted = sizes[min(int(COVERED * len(sizes)), len(sizes) - 1)] / 2 ** (LEVELS - 1)
        power = 10.0 ** math.floor(math.log10(wanted))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))
        return cls(quantity, step)

    def level(self, value: float | None) -> int:
        """Return the nearest level from -5 to 5 on the logarithmic scale."""
        place = self.quantity.place(value)
        if not place:
            return 0
        size = round(math.log2(abs(place) / self.step)) + 1 if math.isfinite(place) else LEVELS
        return int(math.copysign(max(0, min(LEVELS, size)), place))

    @property
    def legend(self) -> list[tuple[int, str]]:
        """All levels with their numbers; the outermost levels are open intervals."""
        if self.quantity.field == CLIPPED:
            return list(_CLIPPING)
        sizes = [self.step * 2**power for power in range(LEVELS)]
        places = [*(-size for size in reversed(sizes)), 0.0, *sizes]
        digits = max(2, -math.floor(math.log10(self.step)))
        words = [_factor(math.exp(place), digits) if self.quantity.is_ratio else signed(place) for place in places]
        words[0], words[-1] = f"≤ {words[0]}", f"≥ {words[-1]}"
        return list(zip(range(-LEVELS, LEVELS + 1), words, strict=True))


def classes_of(numbers: Numbers, scales: Iterable[Scale], clip_range: float | None) -> str:
    """Return the CSS classes of levels other than 0; `cut`: gradient clipped, `out`: only the ratio out of range."""
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
    """Replace spaces alone and invisible characters by symbols; add symbols before line breaks and tabs."""
    if text and not text.strip(" \u00a0\u3000"):
        return "␣" * len(text)
    if _WITHOUT_WIDTH.fullmatch(text):
        return PART
    text = text.replace("\r\n", "\n").replace("\n", f"{LINE_BREAK}\n").replace("\t", f"{TAB}\t")
    return _NOT_SHOWN.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else PART, text)


# --- formatted numbers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Column of the table, computed from the episode's lists in `needs`."""

    name: str
    needs: tuple[str, ...]
    words: Callable[[Numbers], str]

    def fits(self, episode: Mapping[str, Any]) -> bool:
        """Return True if the episode has these lists."""
        return all(name in episode for name in self.needs)


def signed(value: float | None) -> str:
    """Format a number with its sign, also if positive."""
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
    Column("KL penalty", ("kl_rewards",), _signed("kl_rewards")),
    Column("allowed tokens", ("n_allowed",), _plain("n_allowed")),
)
