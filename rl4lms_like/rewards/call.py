"""Call users' rewards and validate the results: one finite number per request, or a `RewardError`.

    score_transition   one token                            used by `TextGenEnv.step`
    score_episodes     all tokens of finished episodes       used by `TextVecEnv.play`; same numbers
    ..._in_parts       both, with the contribution of each part of a `RewardOfParts`

A failure is re-raised with the reward's class and the sample; no default value is substituted. Every exception except
`KeyboardInterrupt` counts as a failure: a `SystemExit` raised by a reward must not look like a finished run, and Rust
panics and cancelled tasks are not subclasses of `Exception`.

Rewards with `terminal` set are called for last tokens only. Parts are summed in float64, in order, in both forms.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.observation import Observation
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.wording import beginning, excerpt, raised
from rl4lms_like.rewards.base import AnyReward, BatchedRewardFunction, RewardFunction, RewardOfParts

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
    """Return the reward of one token; a batched reward is called with a batch of one. Errors as in `score_episodes`."""
    return score_transition_in_parts(reward_fn, previous, action, current, done).total


def score_transition_in_parts(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> TransitionRewards:
    """Return the reward of one token and the contribution of each part; a `RewardError` names the failing part."""
    parts = _parts(reward_fn, lambda own: np.asarray([_score_of_transition(own, previous, action, current, done)]))
    total = float(_total(reward_fn, parts)[0])
    return TransitionRewards(total, {name: float(paid[0]) for name, paid in parts.items() if name})


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
    """Return what `score_episodes` does and the contribution of each part; a `RewardError` names the failing part."""
    parts = _parts(reward_fn, lambda own: _scores_of_episodes(own, episodes))
    total = _total(reward_fn, parts).astype(np.float32)
    return TokenRewards(total, {name: paid for name, paid in parts.items() if name})


def _parts(reward_fn: AnyReward, score: Callable[[AnyReward], np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weighted scores of each part, by name; the name of a reward without parts is empty."""
    parts: dict[str, np.ndarray] = {}
    for leaf in leaves(reward_fn):
        try:
            paid = leaf.weight * score(leaf.reward)
        except RewardError as error:
            if not leaf.name:
                raise
            raise RewardError(f"part {leaf.name!r}: {error}") from error
        parts[leaf.name] = parts.get(leaf.name, 0.0) + paid
    return parts


def _total(reward_fn: AnyReward, parts: Mapping[str, np.ndarray]) -> np.ndarray:
    total = np.asarray(sum(parts.values()))
    invalid = ~(np.abs(total) <= _LARGEST)
    if invalid.any():
        raise RewardError(f"the parts of {_name(reward_fn)} add up to {total[invalid][0]:g}; expected a finite number")
    return total


class Leaf(NamedTuple):
    """Reward without parts of its own, with its total weight and its path of names."""

    name: str
    weight: float
    reward: AnyReward


def leaves(reward_fn: AnyReward) -> Iterator[Leaf]:
    """Yield the parts of a reward, nested ones named `outer/inner`; a reward without parts has one without a name."""
    if not isinstance(reward_fn, RewardOfParts):
        yield Leaf("", 1.0, reward_fn)
        return
    for part in reward_fn.parts:
        for leaf in leaves(part.reward):
            name = f"{part.label}/{leaf.name}" if leaf.name else part.label
            yield Leaf(name, part.weight * leaf.weight, leaf.reward)


def is_batched(reward_fn: AnyReward) -> bool:
    """Return True if the reward, or a part of it, scores many texts in one call."""
    return any(isinstance(leaf.reward, BatchedRewardFunction) for leaf in leaves(reward_fn))


def _score_of_transition(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    if is_terminal(reward_fn) and not done:
        return 0.0
    if isinstance(reward_fn, BatchedRewardFunction):
        return _scores_of_batch(reward_fn, [current], [done])[0]
    return _score_of_token(reward_fn, previous, action, current, done)


def _scores_of_episodes(reward_fn: AnyReward, episodes: Sequence[Observation]) -> np.ndarray:
    """Return the scores of all tokens, flat `[n_tokens]` float64; a terminal reward is called for last tokens only."""
    lengths = [episode.n_actions for episode in episodes]
    terminal = is_terminal(reward_fn)
    spans = [range(length if terminal else 1, length + 1) for length in lengths]
    pairs = list(zip(episodes, spans, strict=True))
    if isinstance(reward_fn, BatchedRewardFunction):
        states = [episode.after(n_actions) for episode, span in pairs for n_actions in span]
        scores = _scores_of_batch(reward_fn, states, [n_actions == span[-1] for span in spans for n_actions in span])
    else:
        scores = [score for episode, span in pairs for score in _scores_of_tokens(reward_fn, episode, span)]
    rewards = np.zeros(sum(lengths))
    rewards[np.cumsum(lengths, dtype=int) - 1 if terminal else slice(None)] = scores
    return rewards


def is_terminal(reward_fn: AnyReward) -> bool:
    """Return True if the reward is declared to be 0 before the last token."""
    return bool(getattr(reward_fn, "terminal", False))


def _scores_of_tokens(reward_fn: RewardFunction, episode: Observation, span: range) -> Iterator[float]:
    previous = episode.after(span[0] - 1)
    for n_actions in span:
        current = episode.after(n_actions)
        action = int(episode.action_ids[n_actions - 1])
        yield _score_of_token(reward_fn, previous, action, current, n_actions == span[-1])
        previous = current


def _score_of_token(
    reward_fn: RewardFunction, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    try:
        score = reward_fn(previous, action, current, done, current.meta_info)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RewardError(f"{_name(reward_fn)} failed on {_token(current)}: {raised(error)}") from error
    number = _finite(score)
    if number is None:
        where = _token(current)
        raise RewardError(f"{_name(reward_fn)} returned {excerpt(score)} for {where}; expected one finite number")
    return number


def _token(state: Observation) -> str:
    return f"token {state.n_actions} of {named(state)}"


def _sample_in_frames(error: BaseException, states: Sequence[Observation]) -> int | None:
    """Return the index of the sample whose prompt, text or `meta_info` a variable of the failing code held, or None.

    The variables are those of the error's traceback, innermost first. Calling the reward again with single texts would
    be more reliable, but it may be remote or paid.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]  # the first is the caller's
    for value in (value for frame in reversed(frames) for value in frame.f_locals.values()):
        if not isinstance(value, str | dict) or not value:  # the type first: the truth value of an array is an error
            continue
        texts = [(one.context_text, one.prompt_or_input_text) for one in states]
        found = [i for i, one in enumerate(states) if value is one.meta_info or value in texts[i]]
        if found and len({states[index].sample.id for index in found}) == 1:
            return found[0]
    return None


def _scores_of_batch(reward_fn: BatchedRewardFunction, states: Sequence[Observation], dones: list[bool]) -> list[float]:
    batch = f"a batch of {len(states)}, which starts with {named(states[0])}"
    try:
        scores = reward_fn(
            [state.prompt_or_input_text for state in states],
            [state.context_text for state in states],
            [state.target_or_reference_texts for state in states],
            dones,
            [state.meta_info for state in states],
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        index = _sample_in_frames(error, states)
        where = batch if index is None else f"{batch}, probably at {named(states[index])}"
        raise RewardError(f"{_name(reward_fn)} failed on {where}: {raised(error)}") from error
    values = as_list(scores)
    if values is None:
        raise RewardError(f"{_name(reward_fn)} returned {excerpt(scores)} for {batch}; expected {len(states)} numbers")
    if len(values) != len(states):
        raise RewardError(f"{_name(reward_fn)} returned {len(values)} values for {batch}; expected {len(states)}")
    numbers = [_finite(value) for value in values]
    if None in numbers:
        first = numbers.index(None)
        raise RewardError(
            f"{_name(reward_fn)} returned {excerpt(values[first])} for {named(states[first])}, entry {first} of "
            f"{batch}; expected one finite number"
        )
    return numbers  # type: ignore[return-value]


def named(state: Observation) -> str:
    """Return the description of a sample for error messages: its id and the beginning of its prompt."""
    return f"sample {state.sample.id!r} (prompt {beginning(state.prompt_or_input_text)})"


def texts_to_score(samples: Sequence[Sample], responses: Sequence[str]) -> list[dict[str, Any]]:
    """Return the inputs of a failed reward, one mapping per response, for the file that a failed run writes."""
    return [
        {
            "sample_id": sample.id,
            "prompt_text": sample.prompt_or_input_text,
            "generated_text": response,
            "references": list(sample.references),
            "meta_info": sample.meta_data,
        }
        for sample, response in zip(samples, responses, strict=True)
    ]


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
