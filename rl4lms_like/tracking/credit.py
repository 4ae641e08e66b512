"""Credit assignment in the report: the content of `token_credit.jsonl` for `credit.html.j2`.

    numbers    {"advantages": 1.3, "kl": -0.02, ...} of a token
    levels     -5 ... 5; each level is twice as far from 0 as the one before
    classes    `a3 k-1`: advantage level 3, KL level -1; the style sheet maps them to colours

Levels are logarithmic because advantages, KL and rewards have long tails. All shown tokens share one scale for each
quantity. To limit the size of the page, long runs are thinned evenly and the middle of long responses is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.record import RunRecord, number, spaced, written_by_a_run
from rl4lms_like.tracking.run_folder import CREDIT_FILE

N_ITERATIONS, N_EPISODES = 12, 10  # maximum number of iterations shown, and of episodes per iteration
N_TOKENS = 8000  # maximum number of tokens shown; with long responses fewer iterations are shown
LONGEST = 400  # maximum number of tokens of one response; of a longer one the beginning and the end are shown
LEVELS = 5  # number of colours on each side of the middle
COVERED = 0.98  # fraction of the tokens within the scale; the others get its outermost colours
END, LINE_BREAK, TAB, PART = "■", "↵", "⇥", "▫"
CLIPPED = "clipped"
CUT_LEVEL, OUT_LEVEL = 5, 2
_CLIPPING = ((-5, "cut below"), (-2, "below, not cut"), (0, "within"), (2, "above, not cut"), (5, "cut above"))
_NOT_SHOWN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_WITHOUT_WIDTH = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]+")
"""Joiners, direction marks and variation selectors, which are invisible on their own."""

Numbers: TypeAlias = "Mapping[str, float | None]"  # numbers of a token, by the names of the episode's lists


@dataclass(frozen=True)
class Quantity:
    """Quantity that determines the colour of tokens."""

    key: str  # first letter of its CSS classes
    name: str  # label of its button
    field: str  # name of the episode's list with its values
    note: str  # meaning of the colours
    is_ratio: bool = False  # use a logarithmic scale around 1; otherwise the scale is centred on 0

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
        words, levels["c"] = ["cut"], CUT_LEVEL if cut > 0 else -CUT_LEVEL
    elif ratio is not None and clip_range is not None and abs(ratio - 1) > clip_range:
        words, levels["c"] = ["out"], OUT_LEVEL if ratio > 1 else -OUT_LEVEL
    return " ".join([*words, *(f"{key}{level}" for key, level in levels.items() if level)])


def visible(text: str) -> str:
    """Replace spaces alone and invisible characters by symbols; add symbols before line breaks and tabs."""
    if text and not text.strip(" \u00a0\u3000"):
        return "␣" * len(text)
    if _WITHOUT_WIDTH.fullmatch(text):
        return PART
    text = text.replace("\r\n", "\n").replace("\n", f"{LINE_BREAK}\n").replace("\t", f"{TAB}\t")
    return _NOT_SHOWN.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 32 else PART, text)


def signed(value: float | None) -> str:
    """Format a number with its sign, also if positive."""
    return f"+{format_number(value)}" if value is not None and value > 0 else format_number(value)


def _factor(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if 1e-3 < value < 1e3 else format_number(value)


COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[..., str]], ...] = (
    ("advantage", ("advantages",), signed),
    ("return", ("returns",), signed),
    ("value", ("values",), signed),
    ("probability", ("probs",), format_number),
    ("after the update", ("probs", "ratios"), lambda p, r: format_number(None if p is None or r is None else p * r)),
    ("ratio", ("ratios",), format_number),
    ("gradient", (CLIPPED,), lambda cut: "" if not cut else "cut above" if cut > 0 else "cut below"),
    ("KL", ("kl",), signed),
    ("reward", ("rewards",), signed),
    ("KL penalty", ("kl_rewards",), signed),
    ("allowed tokens", ("n_allowed",), format_number),
)
"""Columns of the table: name, the lists of the episode that it needs, and the format of their numbers."""


def credit_of(run: RunRecord) -> dict[str, Any] | None:
    """Return what a run recorded about its tokens, or None; a file that no run wrote is an `RL4LMsLikeError`."""
    lines = list({line.get("iteration"): line for line in run.credit if line.get("episodes")}.values())
    with written_by_a_run(run.path / CREDIT_FILE):
        return _credit(run, lines) if lines else None


def _credit(run: RunRecord, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shown = _with_room([_few_episodes(line) for line in lines])
    episodes = [episode for line in shown for episode in line["episodes"]]
    scales = [
        Scale.over(quantity, (value for episode in episodes for value in episode.get(quantity.field, ())))
        for quantity in QUANTITIES
        if any(quantity.field in episode for episode in episodes)
    ]
    columns = [column for column in COLUMNS if any(all(need in each for need in column[1]) for each in episodes)]
    logged = {line["iteration"]: line for line in run.iterations}
    iterations: list[dict[str, Any]] = [
        {
            "iteration": int(line["iteration"]),
            "facts": _facts(logged.get(line["iteration"], {})),
            "episodes": [_episode(episode, line, scales, columns) for episode in line["episodes"]],
        }
        for line in shown
    ]
    followed = [(each["iteration"], one) for each in iterations for one in each["episodes"] if one["is_followed"]]
    ranges = [line["clip_range"] for line in shown if "clip_range" in line]
    return {
        "scales": scales,
        "columns": [name for name, _, _ in columns],
        "followed": followed if len(followed) > 1 else [],  # one prompt over time
        "iterations": iterations,
        "n_recorded": len(lines),
        "n_left_out": max(line["n_left_out"] for line in shown),
        "clip_range": format_number(ranges[-1]) if ranges else None,
        "normalized": shown[-1].get("normalized"),
        "has_kl": any("kl" in episode for episode in episodes),
    }


def _few_episodes(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the line with N_EPISODES evenly spaced episodes and the followed one."""
    episodes = line["episodes"]
    few = spaced(episodes, N_EPISODES)
    chosen = [each for each in episodes if each in few or each["followed"]]
    return {**line, "episodes": chosen, "n_left_out": len(episodes) - len(chosen)}


def _with_room(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the first, the last and evenly spaced lines between them, up to N_TOKENS tokens."""
    for n in range(min(N_ITERATIONS, len(lines)), 1, -1):
        chosen = spaced(lines, n)
        tokens = [min(len(episode["tokens"]), LONGEST) for line in chosen for episode in line["episodes"]]
        if n == 2 or sum(tokens) <= N_TOKENS:
            return chosen
    return lines


def _facts(logged: Mapping[str, Any]) -> str:
    """Return means over the whole rollout as text, for comparison with the episodes."""
    facts = [
        ("reward", number(logged.get("rollout_info/ep_rew")), 1, ""),
        ("KL", number(logged.get("rollout_info/kl_div_mean")), 1, ""),
        ("clipped", number(logged.get("ppo/clip_fraction")), 100, " %"),
    ]
    return " · ".join(f"{name} {format_number(x * by, 2)}{unit}" for name, x, by, unit in facts if x is not None)


def _episode(
    episode: Mapping[str, Any], line: Mapping[str, Any], scales: Sequence[Scale], columns: Sequence[Any]
) -> dict[str, Any]:
    """Return prompt and response as shown; `halves` are the tokens before and after those that are left out."""
    n, half = len(episode["tokens"]), LONGEST // 2
    shown = [*range(n)] if n <= LONGEST else [*range(half), *range(n - half, n)]
    lists = {name: field for name, field in episode.items() if isinstance(field, list) and name != "tokens"}
    clip_range = number(line.get("clip_range"))
    tokens = []
    for i in shown:
        text = _text(episode, i)
        numbers = {name: number(field[i]) for name, field in lists.items()}
        row = [
            (name, words(*(numbers[need] for need in needs)) if all(need in numbers for need in needs) else "")
            for name, needs, words in columns
        ]
        title = "\n".join([f"“{text.strip()}”", *(f"{name} {word}" for name, word in row if word)])
        classes = classes_of(numbers, scales, clip_range)
        tokens.append({"text": text, "classes": classes, "title": title, "row": (text, *(word for _, word in row))})
    rank, n_episodes = int(episode["rank"]), int(line["n_episodes"])
    named = {(n_episodes + 1) // 2: "median", n_episodes: "worst", 1: "best"}
    middle = half if n > LONGEST else n
    return {
        "number": episode.get("episode"),
        "label": f"{named.get(rank, f'rank {rank}')} of {n_episodes}",
        "sample_id": str(episode["sample_id"]),
        "reward": format_number(number(episode["reward"])),
        "prompt": str(episode["prompt"]).strip(),
        "tokens": tokens,
        "halves": (tokens[:middle], tokens[middle:]),
        "hidden": n - len(tokens),
        "is_cut": not episode["terminated"],
        "is_followed": bool(episode["followed"]),
    }


def _text(episode: Mapping[str, Any], i: int) -> str:
    """Return a token's text, or a symbol for a special or partial token."""
    text = visible(str(episode["tokens"][i]))
    if episode["terminated"] and i == len(episode["tokens"]) - 1:
        return text + END
    return text or str(episode["special"].get(str(i), PART))
