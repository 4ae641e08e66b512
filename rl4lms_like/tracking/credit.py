"""Credit assignment in the report: the content of `token_credit.jsonl` for `credit.html.j2`.

    numbers    {"advantages": 1.3, "kl": -0.02, ...} of a token
    levels     -5 ... 5; each level is twice as far from 0 as the one before
    classes    `a3 k-1`: advantage level 3, KL level -1; the style sheet maps them to colours
               `observed`: a token of an environment, which has no numbers and is grey

Levels are logarithmic because advantages, KL and rewards have long tails. All shown tokens share one scale for each
quantity. To limit the size of the page, long runs are thinned evenly and the middle of long responses is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.record import RunRecord, number, spaced, written_by_a_run
from rl4lms_like.tracking.run_folder import CREDIT_FILE
from rl4lms_like.tracking.thumbnails import KEY, N_EMBEDDED, embedded

# Limits of what is shown: a run may record many tokens, and the page is one file.
N_ITERATIONS = 12
N_EPISODES = 10  # maximum number of each iteration
N_TOKENS = 8000  # maximum number of tokens; with long responses fewer iterations are shown
LONGEST = 400  # maximum number of tokens of one response; of a longer one the beginning and the end are shown

LEVELS = 5  # number of colours on each side of the middle
COVERED = 0.98  # fraction of the tokens within the scale; the others get its outermost colours

# Symbols for what has no letters of its own; `PART` is a piece of a character in several tokens.
END = "■"
LINE_BREAK = "↵"
TAB = "⇥"
PART = "▫"

# Clipping has three colours on each side: of tokens whose gradient PPO cuts, and of those with a ratio outside of the
# range whose gradient it keeps (the advantage pulls the ratio back).
CLIPPED = "clipped"
CUT_LEVEL = 5
OUT_LEVEL = 2
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

    def distance(self, value: float | None) -> float | None:
        """Return the signed distance from the middle, or None if there is no number."""
        if value is None or not self.is_ratio:
            return value

        # In log space a ratio of 2 is as far from 1 as a ratio of 1/2. A ratio below 0 is no ratio.
        if value > 0:
            return math.log(value)
        return -math.inf if value == 0 else None


QUANTITIES = (
    Quantity("a", "Advantage", "advantages", "blue: the update pushes the token's probability up, orange: down"),
    Quantity("k", "KL", "kl", "nats; blue: more probable than under the reference, orange: less probable"),
    Quantity("r", "Ratio", "ratios", "the token's probability after the update over that before it", is_ratio=True),
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
        distances = (quantity.distance(number(value)) for value in values)
        sizes = sorted(abs(distance) for distance in distances if distance and math.isfinite(distance))
        if not sizes:
            return cls(quantity, 1.0)

        # Level k is at step * 2^(k - 1): the 98th percentile of the sizes is that of the outermost level. The step is
        # rounded up to 1, 2 or 5 times a power of ten.
        exact_step = sizes[min(int(COVERED * len(sizes)), len(sizes) - 1)] / 2 ** (LEVELS - 1)
        power = 10.0 ** math.floor(math.log10(exact_step))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= exact_step * (1 - 1e-9))
        return cls(quantity, step)

    def level(self, value: float | None) -> int:
        """Return the nearest level from -5 to 5 on the logarithmic scale."""
        distance = self.quantity.distance(value)
        if not distance:
            return 0

        # A ratio of 0, a token that has become impossible, is infinitely far.
        size = LEVELS
        if math.isfinite(distance):
            size = round(math.log2(abs(distance) / self.step)) + 1
        return int(math.copysign(max(0, min(LEVELS, size)), distance))

    @property
    def legend(self) -> list[tuple[int, str]]:
        """All levels with their numbers; the outermost levels are open intervals."""
        if self.quantity.field == CLIPPED:
            return list(_CLIPPING)

        # -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16 times the step.
        sizes = [self.step * 2**power for power in range(LEVELS)]
        distances = [*(-size for size in reversed(sizes)), 0.0, *sizes]

        # Ratios near 1 need as many decimals as the step has: with two, 1.001 and 0.999 would both be 1.00.
        digits = max(2, -math.floor(math.log10(self.step)))
        labels = []
        for distance in distances:
            labels.append(_factor(math.exp(distance), digits) if self.quantity.is_ratio else signed(distance))
        labels[0] = f"≤ {labels[0]}"
        labels[-1] = f"≥ {labels[-1]}"
        return list(zip(range(-LEVELS, LEVELS + 1), labels, strict=True))


def classes_of(numbers: Numbers, scales: Iterable[Scale], clip_range: float | None) -> str:
    """Return the CSS classes of levels other than 0; `cut`: gradient clipped, `out`: only the ratio out of range."""
    levels = {scale.quantity.key: scale.level(numbers.get(scale.quantity.field)) for scale in scales}

    # PPO's gradient is zero only if the advantage pushes the ratio further out; `clipped` has the sign of the side.
    classes = []
    ratio = numbers.get("ratios")
    clipped = numbers.get(CLIPPED)
    if clipped:
        classes.append("cut")
        levels["c"] = CUT_LEVEL if clipped > 0 else -CUT_LEVEL
    elif ratio is not None and clip_range is not None and abs(ratio - 1) > clip_range:
        classes.append("out")
        levels["c"] = OUT_LEVEL if ratio > 1 else -OUT_LEVEL

    for key, level in levels.items():
        if level:
            classes.append(f"{key}{level}")
    return " ".join(classes)


def visible(text: str) -> str:
    """Replace spaces alone and invisible characters by symbols; add symbols before line breaks and tabs."""
    if text and not text.strip(" \u00a0\u3000"):
        return "␣" * len(text)
    if _WITHOUT_WIDTH.fullmatch(text):
        return PART
    text = text.replace("\r\n", "\n").replace("\n", f"{LINE_BREAK}\n").replace("\t", f"{TAB}\t")

    # Unicode has pictures of the first 32 control characters from U+2400 on.
    return _NOT_SHOWN.sub(lambda match: chr(0x2400 + ord(match[0])) if ord(match[0]) < 32 else PART, text)


def signed(value: float | None) -> str:
    """Format a number with its sign, also if positive."""
    return f"+{format_number(value)}" if value is not None and value > 0 else format_number(value)


def _factor(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if 1e-3 < value < 1e3 else format_number(value)


def _probability_after(prob: float | None, ratio: float | None) -> str:
    """Format pi_new(token), which is pi_old(token) times the ratio."""
    return format_number(None if prob is None or ratio is None else prob * ratio)


def _clipping(clipped: float | None) -> str:
    if not clipped:
        return ""
    return "cut above" if clipped > 0 else "cut below"


class Column(NamedTuple):
    """Column of the table of an episode's tokens."""

    name: str
    fields: tuple[str, ...]  # the lists of the episode that it needs
    format: Callable[..., str]  # of one number from each of them

    def is_in(self, names: Container[str]) -> bool:
        """Return True if all lists that the column needs are among these."""
        return all(field in names for field in self.fields)


COLUMNS = (
    Column("advantage", ("advantages",), signed),
    Column("return", ("returns",), signed),
    Column("value", ("values",), signed),
    Column("probability", ("probs",), format_number),
    Column("after the update", ("probs", "ratios"), _probability_after),
    Column("ratio", ("ratios",), format_number),
    Column("gradient", (CLIPPED,), _clipping),
    Column("KL", ("kl",), signed),
    Column("reward", ("rewards",), signed),
    Column("KL penalty", ("kl_rewards",), signed),
    Column("allowed tokens", ("n_allowed",), format_number),
)


def credit_of(run: RunRecord) -> dict[str, Any] | None:
    """Return what a run recorded about its tokens, or None; a file that no run wrote is an `RL4LMsLikeError`."""
    # Of an iteration that was recorded again after a resume, the later line is used.
    lines = list({line.get("iteration"): line for line in run.credit if line.get("episodes")}.values())
    if not lines:
        return None
    with written_by_a_run(run.path / CREDIT_FILE):
        return _credit(run, lines)


def _credit(run: RunRecord, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shown = _with_room([_few_episodes(line) for line in lines])
    episodes: list[Mapping[str, Any]] = []
    for line in shown:
        episodes += line["episodes"]

    fields = set(chain.from_iterable(episodes))
    scales = [_scale(quantity, episodes) for quantity in QUANTITIES if quantity.field in fields]
    columns = []
    for column in COLUMNS:
        if any(column.is_in(episode) for episode in episodes):
            columns.append(column)

    logged = {line["iteration"]: line for line in run.iterations}
    iterations: list[dict[str, Any]] = []
    for line in shown:
        shown_episodes = []
        for index, episode in enumerate(line["episodes"]):
            has_images = index < N_EMBEDDED or episode["followed"]
            images = embedded(run.path, episode) if has_images else []
            shown_episodes.append({**_episode(episode, line, scales, columns), "images": images})
        facts = _facts(logged.get(line["iteration"], {}))
        iterations.append({"iteration": int(line["iteration"]), "facts": facts, "episodes": shown_episodes})

    # Lines of algorithms that do not clip have no `clip_range`.
    clip_ranges = [line["clip_range"] for line in shown if "clip_range" in line]
    return {
        "scales": scales,
        "columns": [column.name for column in columns],
        "followed": _followed(iterations),
        "iterations": iterations,
        "n_recorded": len(lines),
        "n_left_out": max(line["n_left_out"] for line in shown),
        "clip_range": format_number(clip_ranges[-1]) if clip_ranges else None,
        "normalized": shown[-1].get("normalized"),
        "has_kl": "kl" in fields,
        "has_observed": "observed" in fields,
    }


def _followed(iterations: Iterable[Mapping[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return the episodes of the prompt that is followed over the run, with their iterations; none if it has one."""
    followed: list[tuple[int, dict[str, Any]]] = []
    for iteration in iterations:
        for episode in iteration["episodes"]:
            if episode["is_followed"]:
                followed.append((iteration["iteration"], episode))
    return followed if len(followed) > 1 else []


def _scale(quantity: Quantity, episodes: Iterable[Mapping[str, Any]]) -> Scale:
    """Return one scale for all shown tokens, so that a colour means the same in every iteration."""
    values: list[Any] = []
    for episode in episodes:
        values += episode.get(quantity.field, ())
    return Scale.over(quantity, values)


def _few_episodes(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the line with N_EPISODES evenly spaced episodes and the followed one."""
    episodes = line["episodes"]
    spaced_episodes = spaced(episodes, N_EPISODES)
    few = [episode for episode in episodes if episode in spaced_episodes or episode["followed"]]
    return {**line, "episodes": few, "n_left_out": len(episodes) - len(few)}


def _with_room(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the first, the last and evenly spaced lines between them, up to N_TOKENS tokens."""
    # The first and the last are always shown: what training has changed is the comparison of both.
    for n_lines in range(min(N_ITERATIONS, len(lines)), 1, -1):
        chosen = spaced(lines, n_lines)
        n_tokens = 0
        for line in chosen:
            n_tokens += sum(min(len(episode["tokens"]), LONGEST) for episode in line["episodes"])
        if n_lines == 2 or n_tokens <= N_TOKENS:
            return chosen
    return lines


def _facts(logged: Mapping[str, Any]) -> str:
    """Return means over the whole rollout as text, for comparison with the episodes."""
    facts = []
    reward = number(logged.get("rollout_info/ep_rew"))
    if reward is not None:
        facts.append(f"reward {format_number(reward, 2)}")
    kl = number(logged.get("rollout_info/kl_div_mean"))
    if kl is not None:
        facts.append(f"KL {format_number(kl, 2)}")
    clip_fraction = number(logged.get("ppo/clip_fraction"))
    if clip_fraction is not None:
        facts.append(f"clipped {format_number(100 * clip_fraction, 2)} %")
    return " · ".join(facts)


def _episode(
    episode: Mapping[str, Any], line: Mapping[str, Any], scales: Sequence[Scale], columns: Sequence[Column]
) -> dict[str, Any]:
    """Return prompt and response as shown; `halves` are the tokens before and after those that are left out."""
    n_tokens = len(episode["tokens"])
    indices = list(range(n_tokens))
    n_first_half = n_tokens
    if n_tokens > LONGEST:
        n_first_half = LONGEST // 2
        indices = [*range(n_first_half), *range(n_tokens - n_first_half, n_tokens)]

    # All other lists have a number for each token; those of an environment have none.
    other = ("tokens", "observed", KEY)
    lists = {name: field for name, field in episode.items() if isinstance(field, list) and name not in other}
    observed = set(episode.get("observed", ()))
    clip_range = number(line.get("clip_range"))
    tokens = []
    for index in indices:
        is_observed = index in observed
        numbers = {} if is_observed else {name: number(field[index]) for name, field in lists.items()}
        classes = "observed" if is_observed else classes_of(numbers, scales, clip_range)
        tokens.append(_token(_text(episode, index), numbers, classes, columns))

    rank = int(episode["rank"])
    n_episodes = int(line["n_episodes"])
    rank_names = {(n_episodes + 1) // 2: "median", n_episodes: "worst", 1: "best"}  # of one episode: the best
    return {
        "number": episode.get("episode"),
        "label": f"{rank_names.get(rank, f'rank {rank}')} of {n_episodes}",
        "sample_id": str(episode["sample_id"]),
        "reward": format_number(number(episode["reward"])),
        "prompt": str(episode["prompt"]).strip(),
        "tokens": tokens,
        "halves": (tokens[:n_first_half], tokens[n_first_half:]),
        "hidden": n_tokens - len(tokens),
        "is_cut": not episode["terminated"],
        "is_followed": bool(episode["followed"]),
    }


def _token(text: str, numbers: Numbers, classes: str, columns: Sequence[Column]) -> dict[str, Any]:
    """Return a token with its tooltip and its row of the table."""
    row = [text]
    title = [f"“{text.strip()}”"]
    for column in columns:
        # An episode may lack a list that others have, such as the KL of one that was recorded without a reference.
        entry = ""
        if column.is_in(numbers):
            entry = column.format(*(numbers[field] for field in column.fields))
        row.append(entry)
        if entry:
            title.append(f"{column.name} {entry}")
    return {"text": text, "classes": classes, "title": "\n".join(title), "row": tuple(row)}


def _text(episode: Mapping[str, Any], index: int) -> str:
    """Return a token's text, or a symbol for a special or partial token."""
    text = visible(str(episode["tokens"][index]))
    if episode["terminated"] and index == len(episode["tokens"]) - 1:
        return text + END
    return text or str(episode["special"].get(str(index), PART))
