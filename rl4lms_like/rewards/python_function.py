"""Reward from any Python function, sync or async, called once per batch or once per text.

PythonReward(score)                          a function
reward_of([score, (brevity, 0.5)])           what `TextVecEnv` makes of a function or a list of them
reward_block([score, (brevity, 0.5)])        the same as a block of a config
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4lms_like.core.generated import Generated, of_texts
from rl4lms_like.core.sample import Sample
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction, RewardPart, inner_rewards
from rl4lms_like.rewards.combine import CombinedReward
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.python_function import (
    FunctionName,
    FunctionScore,
    built_object,
    column_issue,
    columns_of,
    scores_text,
)
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.functions import NamedFunction, short_name

_REWARDS = (RewardFunction, BatchedRewardFunction)
_TOKEN_FORM = "(prev_observation, action, current_observation, done, meta_info)"


@dataclass(eq=False, repr=False)  # `kwargs` may contain secrets
class PythonReward(FunctionScore, TextReward):
    """Return value of a Python function, which gets what the names of its parameters say.

    With `responses` it gets all texts of a batch as lists, with `response` one text per call, and with `completions`
    the lists that TRL's trainers pass. `prompts`, `references` and `meta_infos` are passed by these names, all others
    are columns of the data.

    Examples:
        >>> def short(responses):
        ...     return [1.0 if len(text) < 20 else 0.0 for text in responses]
        >>> PythonReward(short)(["Why?"], ["It is so."], [[]], [True])
        [1.0]
    """

    def scores(self, texts: Texts) -> Sequence[float]:
        """Return the results of the function."""
        return self.scores_of(of_texts(*texts))

    def scores_of(self, generated: Sequence[Generated]) -> Sequence[float]:
        """Return the results of the function, which may read messages and token ids, too."""
        values: Sequence[float] = self.values(generated)
        return values

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        """False for an async function, which waits for another service."""
        return not self.is_async


def built_reward(object: FunctionName) -> Any:
    """Return a reward that was built in Python.

    Args:
        object: the reward; in a file its name, which cannot be built again.
    """
    return built_object(object, "reward")


def is_function(value: Any) -> bool:
    """Return whether a value can be called and is neither a reward nor a class."""
    return callable(value) and not isinstance(value, _REWARDS) and not inspect.isclass(value)


def reward_of(reward: Any) -> Any:
    """Return the reward that a function or a list of them stands for; any other reward is returned as it is.

    Functions that score single tokens, with the parameters of `RewardFunction.__call__`, are rewards already.

    Args:
        reward: a reward, a function, or a list of rewards, functions, pairs of these with a weight, and `RewardPart`s.

    Raises:
        ConfigError: a function scores neither texts nor tokens, or the list is empty.
    """
    if isinstance(reward, list | tuple):
        try:
            return CombinedReward([_part(*item) for item in _named_items(reward)])
        except ValueError as error:
            raise ConfigError([ConfigIssue("reward", str(error))], "the arguments") from error

    # A class is often given in place of an object of it.
    if inspect.isclass(reward):
        message = f"expected a reward, got the class {reward.__name__}: write {reward.__name__}(...)"
        raise ConfigError([ConfigIssue("reward", message)], "the arguments")
    if not is_function(reward):
        return reward

    # The names of its parameters say whether a function scores texts or tokens.
    if scores_text(reward):
        try:
            return PythonReward(reward)
        except ValueError as error:
            raise ConfigError([ConfigIssue("reward", str(error))], "the arguments") from error
    return _of_tokens(reward)


def column_issues(component: Any, samples: Sequence[Sample], path: str) -> list[ConfigIssue]:
    """Return an error for each parameter of a component's functions that nothing is passed to.

    Args:
        component: a metric, or a reward, perhaps made of others.
        samples: those that it will score; their columns are the keys of their `meta_data`.
        path: config path or argument of the component.
    """
    functions = [inner for inner in inner_rewards(component) if getattr(inner, "needed_columns", ())]
    columns = columns_of(samples) if functions else ()
    messages = [column_issue(function, columns) for function in functions]
    return [ConfigIssue(path, message) for message in messages if message is not None]


def _of_tokens(function: Any) -> Any:
    """Return a function that can be called for tokens; else raise a `ConfigError`."""
    try:
        inspect.signature(function).bind(*[None] * 5)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        message = (
            f"{name} has neither a parameter `responses`, `response` or `completions`, nor those of a reward of "
            f"tokens, {_TOKEN_FORM}: {error}"
        )
        raise ConfigError([ConfigIssue("reward", message)], "the arguments") from error
    except ValueError:  # some built-in functions have no signature
        pass
    return function


def _part(reward: Any, weight: float, name: str) -> RewardPart:
    return RewardPart(reward_of(reward), weight, name)


def _named_items(rewards: Sequence[Any]) -> list[tuple[Any, float, str]]:
    """Return reward, weight and name of each item of a list; equal names get a number."""
    n_of_name: dict[str, int] = {}
    items = []
    for item in rewards:
        reward, weight, name = item, 1.0, None
        if isinstance(item, RewardPart):
            reward, weight, name = item.reward, item.weight, item.label
        elif isinstance(item, tuple):
            if len(item) != 2:
                raise ValueError(f"expected pairs (reward, weight), got a tuple of {len(item)}")
            reward, weight = item
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"expected pairs (reward, weight), got the weight {weight!r:.60}")

        name = name or _label(reward)
        n_of_name[name] = n_of_name.get(name, 0) + 1
        if n_of_name[name] > 1:
            name = f"{name}_{n_of_name[name]}"
        items.append((reward, float(weight), name))
    return items


def _label(reward: Any) -> str:
    """Return the name under which a part is logged: that of the function, the class or the id."""
    if isinstance(reward, Mapping):
        return str(reward.get("name") or _label(reward.get("id")))
    if isinstance(reward, str):
        return short_name(reward)
    if isinstance(reward, PythonReward):
        return reward.label
    if is_function(reward):
        return short_name(NamedFunction(reward))
    return type(reward).__name__


def reward_block(reward: Any) -> Any:
    """Return the block of a config that stands for a reward: `{id, args}`, in Python with functions and objects.

        score                              {id: python, args: {function: score}}
        [score, (brevity, 0.5)]            {id: combine, args: {rewards: [{..., weight: 1.0, name: score}, ...]}}
        ShortAnswers(limit=5)              {id: object, args: {object: ...}}
        {id: score, args: {word: "yes"}}   {id: python, args: {function: score, kwargs: {word: "yes"}}}
        rouge                              {id: rouge}

    Other blocks are returned as they are.

    Raises:
        ValueError: it is a class, the list is empty or has other items, or a weight is not a number.
    """
    if isinstance(reward, list | tuple):
        if not reward:
            raise ValueError("the list of rewards is empty")
        blocks = []
        for item, weight, name in _named_items(reward):
            block = reward_block(item)
            if not isinstance(block, Mapping):
                raise ValueError(f"expected rewards and pairs (reward, weight), got {item!r:.60}")
            blocks.append({**block, "weight": weight, "name": name})
        return {"id": "combine", "args": {"rewards": blocks}}

    if isinstance(reward, str):
        return {"id": reward}
    if isinstance(reward, _REWARDS):
        return {"id": "object", "args": {"object": NamedFunction(reward)}}
    if isinstance(reward, Mapping):
        function = reward.get("id")
        if isinstance(function, str) or not callable(function):
            return reward
        args: dict[str, Any] = {"function": NamedFunction(function)}
        if reward.get("args"):
            args["kwargs"] = reward["args"]
        return {**reward, "id": "python", "args": args}
    if callable(reward):
        return {"id": "python", "args": {"function": NamedFunction(reward)}}
    return reward


def part_block(part: Any) -> Any:
    """Return the block of one of several rewards; a function or an object gives it its name."""
    if isinstance(part, RewardPart):
        return {**reward_block(part.reward), "weight": part.weight, "name": part.label}
    block = reward_block(part)
    if block is not part and not isinstance(part, str):
        return {"name": _label(part), **block}
    return block
