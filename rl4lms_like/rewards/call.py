"""Call users' rewards and validate the results: one finite number per request, or a `RewardError`.

    score_transition   one token                            used by `TextGenEnv.step`
    score_episodes     all tokens of finished episodes       used by `TextVecEnv.play`; same numbers
    ..._in_parts       both, with the contribution of each part of a `RewardOfParts`

A failure is re-raised with the reward's class and the sample; no default value is substituted. Every exception except
`KeyboardInterrupt` counts as a failure: a `SystemExit` raised by a reward must not look like a finished run, and Rust
panics and cancelled tasks are not subclasses of `Exception`.

Rewards with `terminal` set are called for last tokens only. Parts are summed in float64, in order, in both forms.

One of several parts may return None for a token: it then has no opinion. Its contribution is NaN there, and it is left
out of the sum. A token about which no part has an opinion is an error, and so is None of a reward without parts.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import Observation
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards.base import (
    AnyReward,
    BatchedRewardFunction,
    EpisodeReward,
    GeneratedReward,
    RewardFunction,
    RewardOfParts,
)
from rl4lms_like.system.errors import RewardError
from rl4lms_like.system.wording import beginning, excerpt, raised

_LARGEST = float(np.finfo(np.float32).max)

_None: TypeAlias = "float | None"
"""Value in place of None in the result of a reward: NaN, or None if it is an error."""


class TransitionRewards(NamedTuple):
    """Reward of one token and the contribution of each part, NaN if it returned None; without parts there are none."""

    total: float
    parts: dict[str, float]


class TokenRewards(NamedTuple):
    """Rewards of all tokens of some episodes.

    Attributes:
        total: flat `[n_tokens]` float32.
        parts: name -> contribution of that part to `total`, flat `[n_tokens]` float64, NaN where it returned None;
            empty if there are no parts.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]


def score_transition(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> float:
    """Return the reward of one token; a batched reward is called with a batch of one. Errors as in `score_episodes`."""
    return score_transition_in_parts(reward_fn, previous, action=action, current=current, done=done).total


def score_transition_in_parts(
    reward_fn: AnyReward, previous: Observation, action: int, current: Observation, done: bool
) -> TransitionRewards:
    """Return the reward of one token and the contribution of each part; a `RewardError` names the failing part."""

    def score(leaf_reward: AnyReward, none: _None) -> np.ndarray:
        if is_terminal(leaf_reward) and not done:
            return np.zeros(1)
        if isinstance(leaf_reward, BatchedRewardFunction):
            return np.asarray(_scores_of_batch(leaf_reward, [current], [done], none))
        return np.asarray([_score_of_token(leaf_reward, previous, current, action=action, done=done, none=none)])

    scores = _weighted_scores(reward_fn, score)
    total = float(_total(reward_fn, scores, [current])[0])
    return TransitionRewards(total, {name: float(part[0]) for name, part in scores.items() if name})


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
    scores = _weighted_scores(reward_fn, lambda leaf_reward, none: _scores_of_episodes(leaf_reward, episodes, none))
    total = _total(reward_fn, scores, episodes).astype(np.float32)
    return TokenRewards(total, {name: part for name, part in scores.items() if name})


def _weighted_scores(reward_fn: AnyReward, score: Callable[[AnyReward, _None], np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weighted scores of each part, by name; the name of a reward without parts is empty."""
    all_leaves = list(leaves(reward_fn))
    none = math.nan if len(all_leaves) > 1 else None

    scores: dict[str, np.ndarray] = {}
    for leaf in all_leaves:
        try:
            weighted = leaf.weight * score(leaf.reward, none)
        except RewardError as error:
            if not leaf.name:
                raise
            raise RewardError(f"part {leaf.name!r}: {error}") from error

        # `CombinedReward` refuses equal names, another `RewardOfParts` may have them: such parts are logged as one.
        scores[leaf.name] = scores.get(leaf.name, 0.0) + weighted
    return scores


def _total(reward_fn: AnyReward, scores: Mapping[str, np.ndarray], episodes: Sequence[Observation]) -> np.ndarray:
    """Return the sum of the parts; `episodes` are those of the tokens, or one whose last token is scored."""
    # A part is NaN where it left a sample out (None). That is no 0 if no other part has scored the sample.
    summands = list(scores.values())
    if len(summands) > 1 and any(np.isnan(values).any() for values in summands):
        without_opinion = np.logical_and.reduce([np.isnan(values) for values in summands])
        if without_opinion.any():
            ends = np.cumsum([episode.n_actions for episode in episodes])
            index = int(np.searchsorted(ends, without_opinion.argmax(), side="right"))
            sample = named(episodes[index])
            raise RewardError(f"all parts of {_name(reward_fn)} returned None for {sample}; one of them must score it")
        summands = [np.nan_to_num(values, nan=0.0) for values in summands]
    total = np.asarray(sum(summands))

    # Each part is finite, but a sum or a weight may leave float32's range. `~(x <= limit)` is also True for NaN.
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

    # The weights along a path multiply: a part of weight 0.5 in a sum of weight 2 counts once.
    for part in reward_fn.parts:
        for leaf in leaves(part.reward):
            name = f"{part.label}/{leaf.name}" if leaf.name else part.label
            yield Leaf(name, part.weight * leaf.weight, leaf.reward)


def is_batched(reward_fn: AnyReward) -> bool:
    """Return True if the reward, or a part of it, scores many texts in one call."""
    return any(isinstance(leaf.reward, BatchedRewardFunction | EpisodeReward) for leaf in leaves(reward_fn))


def _scores_of_episodes(reward_fn: AnyReward, episodes: Sequence[Observation], none: _None) -> np.ndarray:
    """Return the scores of all tokens, flat `[n_tokens]` float64; a terminal reward is called for last tokens only."""
    if isinstance(reward_fn, EpisodeReward):
        return _scores_of_whole_episodes(reward_fn, episodes)
    lengths = [episode.n_actions for episode in episodes]
    scores_last_token_only = is_terminal(reward_fn)

    # States to score, by their number of actions: 1 to n_actions of every episode, or n_actions alone.
    scored_states: list[tuple[Observation, range]] = []
    for episode, length in zip(episodes, lengths, strict=True):
        first = length if scores_last_token_only else 1
        scored_states.append((episode, range(first, length + 1)))

    scores: list[float] = []
    if isinstance(reward_fn, BatchedRewardFunction):
        states = []
        dones = []
        for episode, span in scored_states:
            states += [episode.after(n_actions) for n_actions in span]
            dones += [n_actions == episode.n_actions for n_actions in span]
        scores = _scores_of_batch(reward_fn, states, dones, none)
    else:
        for episode, span in scored_states:
            scores += _scores_of_tokens(reward_fn, episode, span, none)

    # The last token of episode i is at index sum(lengths[:i + 1]) - 1; the other tokens keep a reward of 0.
    rewards = np.zeros(sum(lengths))
    if scores_last_token_only:
        rewards[np.cumsum(lengths, dtype=int) - 1] = scores
    else:
        rewards[:] = scores
    return rewards


def _scores_of_whole_episodes(reward_fn: EpisodeReward, episodes: Sequence[Observation]) -> np.ndarray:
    """Return the scores of all tokens, flat `[n_tokens]` float64, from one call with all episodes."""
    batch = f"a batch of {len(episodes)}, which starts with {named(episodes[0])}"
    try:
        scores = reward_fn.rewards_of(episodes)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RewardError(f"{_name(reward_fn)} failed on {batch}: {raised(error)}") from error

    if len(scores) != len(episodes):
        raise RewardError(f"{_name(reward_fn)} returned {len(scores)} lists for {batch}; expected {len(episodes)}")
    numbers: list[float] = []
    for episode, of_tokens in zip(episodes, scores, strict=True):
        if len(of_tokens) != episode.n_actions:
            counts = f"{len(of_tokens)} numbers for the {episode.n_actions} tokens of {named(episode)}"
            raise RewardError(f"{_name(reward_fn)} returned {counts}")
        for value in of_tokens:
            number = finite_number(value)
            if number is None:
                what = f"{excerpt(value)} for a token of {named(episode)}"
                raise RewardError(f"{_name(reward_fn)} returned {what}; expected one finite number")
            numbers.append(number)
    return np.asarray(numbers)


def is_terminal(reward_fn: AnyReward) -> bool:
    """Return True if the reward is declared to be 0 before the last token."""
    # By `getattr`, because in Python a reward may be any callable with the signature of a `RewardFunction`.
    return bool(getattr(reward_fn, "terminal", False))


def _scores_of_tokens(reward_fn: RewardFunction, episode: Observation, span: range, none: _None) -> list[float]:
    """Return the scores of an episode's tokens, each identified by the number of actions after it."""
    scores = []
    previous = episode.after(span[0] - 1)
    for n_actions in span:
        action = int(episode.action_ids[n_actions - 1])
        done = n_actions == episode.n_actions

        # One object is the state after a token and before the next one, so its text is decoded once.
        current = episode.after(n_actions)
        scores.append(_score_of_token(reward_fn, previous, current, action=action, done=done, none=none))
        previous = current
    return scores


def _score_of_token(
    reward_fn: RewardFunction, previous: Observation, current: Observation, *, action: int, done: bool, none: _None
) -> float:
    # By position, because users' rewards may name their parameters differently.
    try:
        score = reward_fn(previous, action, current, done, current.meta_info)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RewardError(f"{_name(reward_fn)} failed on {_token(current)}: {raised(error)}") from error

    number = none if score is None else finite_number(score)
    if number is None:
        where = _token(current)
        raise RewardError(f"{_name(reward_fn)} returned {excerpt(score)} for {where}; expected one finite number")
    return number


def _token(state: Observation) -> str:
    return f"token {state.n_actions} of {named(state)}"


def _sample_in_frames(error: BaseException, states: Sequence[Observation]) -> int | None:
    """Return the index of the sample whose prompt, text or `meta_info` was an argument of a failing function, or None.

    The functions are those of the error's traceback, innermost first. Calling the reward again with single texts would
    find more samples, but it may be remote or paid.
    """
    # Only arguments: a function works on them until it returns. Other variables may be left over from a loop that has
    # finished, or from the sample before. The first frame is the caller's.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    values: list[Any] = []
    for frame in reversed(frames):
        arguments = inspect.getargvalues(frame)
        values += [arguments.locals[name] for name in arguments.args if name in arguments.locals]

    for value in values:
        # The type comes first: the truth value of an array is an error.
        if not isinstance(value, str | dict) or not value:
            continue
        matching = []
        for index, state in enumerate(states):
            if value is state.meta_info or value in (state.context_text, state.prompt_or_input_text):
                matching.append(index)

        # A text that occurs in several samples, such as a common prompt, does not identify one of them.
        if len({states[index].sample.id for index in matching}) == 1:
            return matching[0]
    return None


def _scores_of_batch(
    reward_fn: BatchedRewardFunction, states: Sequence[Observation], dones: list[bool], none: _None
) -> list[float]:
    batch = f"a batch of {len(states)}, which starts with {named(states[0])}"
    try:
        scores = _returned(reward_fn, states, dones)
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

    numbers = []
    for index, value in enumerate(values):
        number = none if value is None else finite_number(value)
        if number is None:
            raise RewardError(
                f"{_name(reward_fn)} returned {excerpt(value)} for {named(states[index])}, entry {index} of "
                f"{batch}; expected one finite number"
            )
        numbers.append(number)
    return numbers


def _returned(reward_fn: BatchedRewardFunction, states: Sequence[Observation], dones: list[bool]) -> Any:
    """Return what a batched reward returns for some states."""
    # A terminal reward is called for finished responses only.
    if isinstance(reward_fn, GeneratedReward):
        generated = []
        for state in states:
            generated.append(Generated(state.sample, state.context_text, state.prompt_ids, state.action_ids))
        return reward_fn.scores_of(generated)

    # By position, because users' rewards may name their parameters differently.
    return reward_fn(
        [state.prompt_or_input_text for state in states],
        [state.context_text for state in states],
        [state.target_or_reference_texts for state in states],
        dones,
        [state.meta_info for state in states],
    )


def named(state: Observation) -> str:
    """Return the description of a sample for error messages: its id and the beginning of its prompt."""
    return f"sample {state.sample.id!r} (prompt {beginning(state.prompt_or_input_text)})"


def texts_to_score(samples: Sequence[Sample], responses: Sequence[str]) -> list[dict[str, Any]]:
    """Return the inputs of a failed reward, one mapping per response, for the file that a failed run writes."""
    texts = []
    for sample, response in zip(samples, responses, strict=True):
        text = {
            "sample_id": sample.id,
            "prompt_text": sample.prompt_or_input_text,
            "generated_text": response,
            "references": list(sample.references),
            "meta_info": sample.meta_data,
        }
        texts.append(text)
    return texts


def as_list(scores: Any) -> list[Any] | None:
    """Convert the result of a batched reward (sequence, array or tensor) to a list; None for anything else."""
    # A tensor may have no data (of the device "meta", or sparse); what it raises is torch's choice.
    values = scores
    if hasattr(scores, "tolist"):
        try:
            values = scores.tolist()
        except Exception:
            return None

    # Texts, mappings and sets can be iterated, but their items are not scores in the order of the responses.
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        return None
    return list(values)


def finite_number(value: Any) -> float | None:
    """Return the value as a float, or None unless it is one finite number in float32's range."""
    # `float` would accept "0.5".
    if isinstance(value, (str, bytes)):
        return None

    # A tensor with several elements raises a RuntimeError, an array a TypeError.
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) <= _LARGEST else None


def _name(reward_fn: AnyReward) -> str:
    return getattr(reward_fn, "__name__", type(reward_fn).__name__)
