"""Credit assignment in the report: the content of `token_credit.jsonl` for `credit.html.j2`.

    Credit
      scales          one colour scale per quantity, shared by all shown tokens
      followed        one prompt over time, if it occurred several times
      iterations      in order; the last one is unfolded
        episodes      label, prompt, tokens (`credit_tokens`)

To limit the size of the page, long runs are thinned evenly and the middle of long responses is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rl4lms_like.core.errors import RL4LMsLikeError
from rl4lms_like.tracking.charts import format_number
from rl4lms_like.tracking.credit_tokens import COLUMNS, END, PART, QUANTITIES, Column, Scale, classes_of, visible
from rl4lms_like.tracking.record import RunRecord, number
from rl4lms_like.tracking.run_folder import CREDIT_FILE

N_ITERATIONS, N_EPISODES = 12, 10
"""Maximum number of iterations shown, and of episodes per iteration."""
N_TOKENS = 8000
"""Maximum number of tokens shown; with long responses fewer iterations are shown."""
LONGEST = 400
"""Maximum number of tokens of one response; of a longer one the beginning and the end are shown."""
_FACTS = {
    "reward": ("rollout_info/ep_rew", 1, ""),
    "KL": ("rollout_info/kl_div_mean", 1, ""),
    "clipped": ("ppo/clip_fraction", 100, " %"),
}
Item = TypeVar("Item")


@dataclass(frozen=True)
class Token:
    """Token as shown; `row` is its row of the table."""

    text: str
    classes: str
    title: str
    row: tuple[str, ...]


@dataclass(frozen=True)
class Episode:
    """Prompt and response as shown."""

    label: str
    sample_id: str
    reward: str
    prompt: str
    tokens: Sequence[Token]
    hidden: int
    is_cut: bool
    is_followed: bool

    @property
    def halves(self) -> tuple[Sequence[Token], Sequence[Token]]:
        """Tokens before and after those that are left out."""
        middle = LONGEST // 2 if self.hidden else len(self.tokens)
        return self.tokens[:middle], self.tokens[middle:]


@dataclass(frozen=True)
class Iteration:
    """Episodes of one rollout as shown."""

    iteration: int
    facts: str
    episodes: Sequence[Episode]


@dataclass(frozen=True)
class Credit:
    """Content of the whole section."""

    scales: Sequence[Scale]
    columns: Sequence[str]
    followed: Sequence[tuple[int, Episode]]
    iterations: Sequence[Iteration]
    n_recorded: int
    n_left_out: int
    clip_range: str | None
    normalized: str | None
    has_kl: bool


def credit_of(run: RunRecord) -> Credit | None:
    """Return what a run recorded about its tokens, or None if it recorded nothing.

    Raises:
        RL4LMsLikeError: the file was not written by a run.
    """
    lines = list({line.get("iteration"): line for line in run.credit if line.get("episodes")}.values())
    try:
        return _credit(run, lines) if lines else None
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        file = run.path / CREDIT_FILE
        raise RL4LMsLikeError(f"{file} was not written by a run: {type(error).__name__}: {error}") from error


def _credit(run: RunRecord, lines: Sequence[Mapping[str, Any]]) -> Credit:
    shown = _with_room([_few_episodes(line) for line in lines])
    episodes = [episode for line in shown for episode in line["episodes"]]
    scales = [
        Scale.over(quantity, (value for episode in episodes for value in episode.get(quantity.field, ())))
        for quantity in QUANTITIES
        if any(quantity.field in episode for episode in episodes)
    ]
    columns = [column for column in COLUMNS if any(column.fits(episode) for episode in episodes)]
    logged = {line["iteration"]: line for line in run.iterations}
    iterations = [
        Iteration(
            int(line["iteration"]),
            _facts(logged.get(line["iteration"], {})),
            [_episode(episode, line, scales, columns) for episode in line["episodes"]],
        )
        for line in shown
    ]
    followed = [(each.iteration, episode) for each in iterations for episode in each.episodes if episode.is_followed]
    return Credit(
        scales=scales,
        columns=[column.name for column in columns],
        followed=followed if len(followed) > 1 else [],
        iterations=iterations,
        n_recorded=len(lines),
        n_left_out=max(line["n_left_out"] for line in shown),
        clip_range=next((format_number(line["clip_range"]) for line in reversed(shown) if "clip_range" in line), None),
        normalized=shown[-1].get("normalized"),
        has_kl=any("kl" in episode for episode in episodes),
    )


def _few_episodes(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the line with N_EPISODES evenly spaced episodes and the followed one."""
    episodes = line["episodes"]
    steps = {step * (len(episodes) - 1) // (N_EPISODES - 1) for step in range(N_EPISODES)}
    chosen = [each for index, each in enumerate(episodes) if index in steps or each["followed"]]
    return {**line, "episodes": chosen, "n_left_out": len(episodes) - len(chosen)}


def _with_room(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the first, the last and evenly spaced lines between them, up to N_TOKENS tokens."""
    for n in range(min(N_ITERATIONS, len(lines)), 2, -1):
        chosen = _spaced(lines, n)
        tokens = [min(len(episode["tokens"]), LONGEST) for line in chosen for episode in line["episodes"]]
        if sum(tokens) <= N_TOKENS:
            return chosen
    return _spaced(lines, min(2, len(lines)))


def _spaced(items: Sequence[Item], n: int) -> list[Item]:
    """Return `n` evenly spaced items, always with the last one."""
    last = len(items) - 1
    return [items[last if n == 1 else step * last // (n - 1)] for step in range(n)]


def _facts(logged: Mapping[str, Any]) -> str:
    """Return means over the whole rollout as text, for comparison with the episodes."""
    known = {name: (number(logged.get(key)), factor, unit) for name, (key, factor, unit) in _FACTS.items()}
    said = [
        f"{name} {format_number(value * factor, 2)}{unit}"
        for name, (value, factor, unit) in known.items()
        if value is not None
    ]
    return " · ".join(said)


def _episode(
    episode: Mapping[str, Any], line: Mapping[str, Any], scales: Sequence[Scale], columns: Sequence[Column]
) -> Episode:
    n, half = len(episode["tokens"]), LONGEST // 2
    shown = [*range(n)] if n <= LONGEST else [*range(half), *range(n - half, n)]
    lists = {name: field for name, field in episode.items() if isinstance(field, list) and name != "tokens"}
    clip_range = number(line.get("clip_range"))
    tokens = []
    for i in shown:
        text = _text(episode, i)
        numbers = {name: number(field[i]) for name, field in lists.items()}
        words = [(column.name, column.words(numbers) if column.fits(episode) else "") for column in columns]
        title = "\n".join([f"“{text.strip()}”", *(f"{name} {word}" for name, word in words if word)])
        row = (text, *(word for _, word in words))
        tokens.append(Token(text, classes_of(numbers, scales, clip_range), title, row))
    return Episode(
        label=_label(int(episode["rank"]), int(line["n_episodes"])),
        sample_id=str(episode["sample_id"]),
        reward=format_number(number(episode["reward"])),
        prompt=str(episode["prompt"]).strip(),
        tokens=tokens,
        hidden=n - len(tokens),
        is_cut=not episode["terminated"],
        is_followed=bool(episode["followed"]),
    )


def _label(rank: int, n_episodes: int) -> str:
    named = {(n_episodes + 1) // 2: "median", n_episodes: "worst", 1: "best"}
    return f"{named[rank]} of {n_episodes}" if rank in named else f"rank {rank} of {n_episodes}"


def _text(episode: Mapping[str, Any], i: int) -> str:
    """Return a token's text, or a symbol for a special or partial token."""
    text = visible(str(episode["tokens"][i]))
    if episode["terminated"] and i == len(episode["tokens"]) - 1:
        return text + END
    return text or str(episode["special"].get(str(i), PART))
