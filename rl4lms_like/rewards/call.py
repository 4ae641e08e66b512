"""Calls users' rewards and vouches for what comes back: one finite number for each request, or a `RewardError`.

    score_transition   one token                            what `TextGenEnv.step` pays
    score_episodes     all tokens of finished episodes       what `TextVecEnv.play` pays; the same numbers

A failure is attributed to the reward's class and the sample, and raised; nothing is put in its place. Rewards that
promise to be `terminal` are called for last tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction

AnyReward: TypeAlias = "RewardFunction | BatchedRewardFunction"

_LARGEST = float(np.finfo(np.float32).max)
_EXCERPT = 60


def score_transition(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    """The reward of one token; a batched reward is called with a batch of one.

    Raises:
        RewardError: the reward failed, or did not return one finite number.
    """
    if is_terminal(reward_fn) and not done:
        return 0.0
    if isinstance(reward_fn, BatchedRewardFunction):
        return _scores_of_batch(reward_fn, [current], [done])[0]
    return _score_of_token(reward_fn, previous, action, current, done)


def score_episodes(reward_fn: AnyReward, episodes: Sequence[Observation]) -> np.ndarray:
    """The rewards of all tokens of finished episodes; `done` holds at the last token of each, however it ended.

    Args:
        reward_fn: the task's reward.
        episodes: the last observation of each, with at least one action.

    Returns:
        Flat `[n_tokens]` float32: the tokens of episode 0, then those of episode 1, ...

    Raises:
        RewardError: the reward failed, or did not return one finite number for each request.
    """
    lengths = [episode.n_actions for episode in episodes]
    if isinstance(reward_fn, BatchedRewardFunction):
        rewards = np.zeros(sum(lengths), dtype=np.float32)
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
    paid = [score for episode in episodes for score in _scores_of_episode(reward_fn, episode)]
    return np.asarray(paid, dtype=np.float32)


def is_terminal(reward_fn: AnyReward) -> bool:
    """Whether the reward promises to be 0 before the last token."""
    return bool(getattr(reward_fn, "terminal", False))


def _last_tokens_only(reward_fn: RewardFunction, episodes: Sequence[Observation], lengths: list[int]) -> np.ndarray:
    rewards = np.zeros(sum(lengths), dtype=np.float32)
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
    """The observations after each token, the first one to the last."""
    return (episode.after(n_actions) for n_actions in range(1, episode.n_actions + 1))


def _score_of_token(
    reward_fn: RewardFunction, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    try:
        score = reward_fn(previous, action, current, done, current.meta_info)
    except Exception as error:
        where = f"token {current.n_actions} of {_named(current)}"
        raise RewardError(f"{_name(reward_fn)} failed on {where}: {type(error).__name__}: {error}") from error
    number = _finite(score)
    if number is None:
        where = f"token {current.n_actions} of {_named(current)}"
        raise RewardError(f"{_name(reward_fn)} returned {score!r} for {where}; expected one finite number")
    return number


def _scores_of_batch(reward_fn: BatchedRewardFunction, states: Sequence[Observation], dones: list[bool]) -> list[float]:
    batch = f"a batch of {len(states)}, which starts with {_named(states[0])}"
    try:
        scores = reward_fn(
            [state.prompt_or_input_text for state in states],
            [state.context_text for state in states],
            [state.target_or_reference_texts for state in states],
            dones,
            [state.meta_info for state in states],
        )
    except Exception as error:
        raise RewardError(f"{_name(reward_fn)} failed on {batch}: {type(error).__name__}: {error}") from error
    values = _as_list(scores)
    if values is None:
        raise RewardError(f"{_name(reward_fn)} returned {scores!r} for {batch}; expected {len(states)} numbers")
    if len(values) != len(states):
        raise RewardError(f"{_name(reward_fn)} returned {len(values)} values for {batch}; expected {len(states)}")
    numbers = [_finite(value) for value in values]
    if None in numbers:
        culprit = numbers.index(None)
        raise RewardError(
            f"{_name(reward_fn)} returned {values[culprit]!r} for {_named(states[culprit])}, entry {culprit} of "
            f"{batch}; expected one finite number"
        )
    return numbers  # type: ignore[return-value]


def _as_list(scores: Any) -> list[Any] | None:
    """A list of what a batched reward returned: a sequence, an array or a tensor; None for anything else."""
    values = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__"):
        return None
    return list(values)


def _finite(value: Any) -> float | None:
    """The value as a float, None unless it is one finite number that float32 can hold."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) <= _LARGEST else None


def _name(reward_fn: AnyReward) -> str:
    return getattr(reward_fn, "__name__", type(reward_fn).__name__)


def _named(state: Observation) -> str:
    text = state.prompt_or_input_text
    excerpt = text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 3]}..."
    return f"sample {state.sample.id!r} (prompt {excerpt!r})"
