"""Call users' rewards and validate the results: one finite number per request, or a `RewardError`.

    score_transition   one token                            used by `TextGenEnv.step`
    score_episodes     all tokens of finished episodes       used by `TextVecEnv.play`; same numbers
    ..._in_parts       both, with the contribution of each part of a `RewardOfParts`

A failure is re-raised with the reward's class and the sample; no default value is substituted. Every exception except
`KeyboardInterrupt` counts as a failure: a `SystemExit` raised by a reward must not look like a finished run, and Rust
panics and cancelled tasks are not subclasses of `Exception`. A batched reward that fails is called again with single
texts, to find the failing sample.

Rewards with `terminal` set are called for last tokens only. Parts are summed in float64, in order, in both forms.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.observation import Observation
from rl4lms_like.core.wording import excerpt, raised
from rl4lms_like.rewards import base
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction, RewardOfParts
from rl4lms_like.rewards.culprit import culprit
from rl4lms_like.rewards.naming import named
from rl4lms_like.rewards.time_limit import TimeIsUp

AnyReward: TypeAlias = base.AnyReward

_LARGEST = float(np.finfo(np.float32).max)


class TransitionRewards(NamedTuple):
    """Reward of one token and the contribution of each part; `parts` is empty if the reward has no parts."""

    total: float
    parts: dict[str, float]


class TokenRewards(NamedTuple):
    """Rewards of all tokens of some episodes.

    Attributes:
        total: flat `[n_tokens]` float32.
        parts: name -> contribution of that part to `total`, flat `[n_tokens]` float64; empty if there are no parts.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]


def score_transition(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    """Return the reward of one token; a batched reward is called with a batch of one.

    Raises:
        RewardError: the reward failed, or did not return one finite number.
    """
    return score_transition_in_parts(reward_fn, previous, action, current, done).total


def score_transition_in_parts(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> TransitionRewards:
    """Return the reward of one token and the contribution of each part.

    Raises:
        RewardError: as for `score_transition`; the message names the failing part.
    """
    if not isinstance(reward_fn, RewardOfParts):
        return TransitionRewards(_score_of_transition(reward_fn, previous, action, current, done), {})
    parts: dict[str, float] = {}
    for leaf in leaves(reward_fn):
        with _Attributed(leaf.name):
            paid = leaf.weight * _score_of_transition(leaf.reward, previous, action, current, done)
        parts[leaf.name] = parts.get(leaf.name, 0.0) + paid
    total = sum(parts.values())
    _check_total(np.asarray([total]), reward_fn)
    return TransitionRewards(total, parts)


def score_episodes(reward_fn: AnyReward, episodes: Sequence[Observation]) -> np.ndarray:
    """Return the rewards of all tokens of finished episodes; `done` is True at the last token of each episode.

    Args:
        reward_fn: the task's reward.
        episodes: the last observation of each episode, terminated or truncated, with at least one action.

    Returns:
        Flat `[n_tokens]` float32: the tokens of episode 0, then those of episode 1, ...

    Raises:
        RewardError: the reward failed, or did not return one finite number for each request.
    """
    return score_episodes_in_parts(reward_fn, episodes).total


def score_episodes_in_parts(reward_fn: AnyReward, episodes: Sequence[Observation]) -> TokenRewards:
    """Return the rewards of all tokens of finished episodes and the contribution of each part.

    Raises:
        RewardError: as for `score_episodes`; the message names the failing part.
    """
    if not isinstance(reward_fn, RewardOfParts):
        return TokenRewards(_scores_of_episodes(reward_fn, episodes).astype(np.float32), {})
    parts: dict[str, np.ndarray] = {}
    for leaf in leaves(reward_fn):
        with _Attributed(leaf.name):
            paid = leaf.weight * _scores_of_episodes(leaf.reward, episodes)
        parts[leaf.name] = parts.get(leaf.name, 0.0) + paid
    total = np.asarray(sum(parts.values()))
    _check_total(total, reward_fn)
    return TokenRewards(total.astype(np.float32), parts)


class Leaf(NamedTuple):
    """Reward without parts of its own, with its total weight and its path of names."""

    name: str
    weight: float
    reward: AnyReward


def leaves(reward_fn: RewardOfParts) -> Iterator[Leaf]:
    """Yield the parts of a reward; nested parts are flattened and named `outer/inner`."""
    for part in reward_fn.parts:
        if isinstance(part.reward, RewardOfParts):
            for leaf in leaves(part.reward):
                yield Leaf(f"{part.label}/{leaf.name}", part.weight * leaf.weight, leaf.reward)
        else:
            yield Leaf(part.label, part.weight, part.reward)


def is_batched(reward_fn: AnyReward) -> bool:
    """Return True if the reward, or a part of it, scores many texts in one call."""
    if isinstance(reward_fn, RewardOfParts):
        return any(is_batched(part.reward) for part in reward_fn.parts)
    return isinstance(reward_fn, BatchedRewardFunction)


class _Attributed:
    """Context manager that adds the name of the part to a `RewardError`."""

    def __init__(self, part: str) -> None:
        self.part = part

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RewardError):
            raise RewardError(f"part {self.part!r}: {error}") from error


def _check_total(totals: np.ndarray, reward_fn: RewardOfParts) -> None:
    if not bool((np.abs(totals) <= _LARGEST).all()):
        culprit = totals[~(np.abs(totals) <= _LARGEST)][0]
        raise RewardError(f"the parts of {_name(reward_fn)} add up to {culprit:g}; expected one finite number")


def _score_of_transition(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    if is_terminal(reward_fn) and not done:
        return 0.0
    if isinstance(reward_fn, BatchedRewardFunction):
        return _scores_of_batch(reward_fn, [current], [done])[0]
    return _score_of_token(reward_fn, previous, action, current, done)


def _scores_of_episodes(reward_fn: AnyReward, episodes: Sequence[Observation]) -> np.ndarray:
    """Flat `[n_tokens]` float64."""
    lengths = [episode.n_actions for episode in episodes]
    if isinstance(reward_fn, BatchedRewardFunction):
        rewards = np.zeros(sum(lengths))
        if is_terminal(reward_fn):
            last_tokens = np.cumsum(lengths) - 1
            rewards[last_tokens] = _scores_of_batch(reward_fn, episodes, [True] * len(episodes))
        else:
            states = [state for episode in episodes for state in _states(episode)]
            dones = [n_actions == length for length in lengths for n_actions in range(1, length + 1)]
            rewards[:] = _scores_of_batch(reward_fn, states, dones)
        return rewards
    if is_terminal(reward_fn):
        return _last_tokens_only(reward_fn, episodes, lengths)
    return np.asarray([score for episode in episodes for score in _scores_of_episode(reward_fn, episode)])


def is_terminal(reward_fn: AnyReward) -> bool:
    """Return True if the reward is declared to be 0 before the last token."""
    return bool(getattr(reward_fn, "terminal", False))


def _last_tokens_only(reward_fn: RewardFunction, episodes: Sequence[Observation], lengths: list[int]) -> np.ndarray:
    rewards = np.zeros(sum(lengths))
    end = 0
    for episode, length in zip(episodes, lengths, strict=True):
        end += length
        previous, action = episode.after(length - 1), int(episode.action_ids[-1])
        rewards[end - 1] = _score_of_token(reward_fn, previous, action, episode, True)
    return rewards


def _scores_of_episode(reward_fn: RewardFunction, episode: Observation) -> Iterator[float]:
    previous, length = episode.after(0), episode.n_actions
    for action, current in zip(episode.action_ids.tolist(), _states(episode), strict=True):
        yield _score_of_token(reward_fn, previous, action, current, current.n_actions == length)
        previous = current


def _states(episode: Observation) -> Iterator[Observation]:
    """Yield the observation after each token, from the first to the last."""
    return (episode.after(n_actions) for n_actions in range(1, episode.n_actions + 1))


def _score_of_token(
    reward_fn: RewardFunction, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    try:
        score = reward_fn(previous, action, current, done, current.meta_info)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = f"token {current.n_actions} of {named(current)}"
        raise RewardError(f"{_name(reward_fn)} failed on {where}: {raised(error)}") from error
    number = _finite(score)
    if number is None:
        where = f"token {current.n_actions} of {named(current)}"
        raise RewardError(f"{_name(reward_fn)} returned {excerpt(score)} for {where}; expected one finite number")
    return number


def _scores_of_batch(reward_fn: BatchedRewardFunction, states: Sequence[Observation], dones: list[bool]) -> list[float]:
    batch = f"a batch of {len(states)}, which starts with {named(states[0])}"
    began = time.monotonic()
    try:
        scores = _call(reward_fn, states, dones)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = f"{_name(reward_fn)} failed on {batch}: {raised(error)}"
        if not isinstance(error, TimeIsUp | SystemExit):
            said += _with_culprit(reward_fn, states, dones, error, time.monotonic() - began)
        raise RewardError(said) from error
    values = as_list(scores)
    if values is None:
        raise RewardError(f"{_name(reward_fn)} returned {excerpt(scores)} for {batch}; expected {len(states)} numbers")
    if len(values) != len(states):
        raise RewardError(f"{_name(reward_fn)} returned {len(values)} values for {batch}; expected {len(states)}")
    numbers = [_finite(value) for value in values]
    if None in numbers:
        culprit = numbers.index(None)
        raise RewardError(
            f"{_name(reward_fn)} returned {excerpt(values[culprit])} for {named(states[culprit])}, entry {culprit} of "
            f"{batch}; expected one finite number"
        )
    return numbers  # type: ignore[return-value]


def _call(reward_fn: BatchedRewardFunction, states: Sequence[Observation], dones: list[bool]) -> Any:
    return reward_fn(
        [state.prompt_or_input_text for state in states],
        [state.context_text for state in states],
        [state.target_or_reference_texts for state in states],
        dones,
        [state.meta_info for state in states],
    )


def _with_culprit(
    reward_fn: BatchedRewardFunction,
    states: Sequence[Observation],
    dones: list[bool],
    error: BaseException,
    seconds: float,
) -> str:
    def alone(place: int) -> Any:
        return _call(reward_fn, states[place : place + 1], dones[place : place + 1])

    place = culprit(reward_fn, alone, len(states), error, seconds)
    return "" if place is None else f". It fails on entry {place} alone too: {named(states[place])}"


def as_list(scores: Any) -> list[Any] | None:
    """Convert the result of a batched reward (sequence, array or tensor) to a list; None for anything else."""
    values = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        return None
    return list(values)


def _finite(value: Any) -> float | None:
    """Return the value as a float, or None unless it is one finite number in float32's range."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) <= _LARGEST else None


def _name(reward_fn: AnyReward) -> str:
    return getattr(reward_fn, "__name__", type(reward_fn).__name__)
