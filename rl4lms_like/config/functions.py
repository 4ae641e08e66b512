"""Functions in place of components: what a config made in Python, or an import path in a file, may have as a reward.

    reward_fn: score                              {id: python, args: {function: score}}
    reward_fn: [score, (brevity, 0.5)]            {id: combine, args: {rewards: [...]}}
    reward_fn: {id: my_rewards:score}             {id: python, args: {function: my_rewards:score}}
    metrics: [score]                              [{id: python, args: {function: score}}]
    callbacks: [MyCallback]                       [{id: object, args: {object: MyCallback()}}]
    env.dialogue: MyEnv                           {id: object, args: {object: MyEnv()}}

The blocks on the right are what is checked and written to `config.json`. Objects that were built in Python become
blocks with the id `object`; a class of a callback is called without arguments, that of an environment with its `args`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rl4lms_like.callbacks.base import Callback
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import RewardPart
from rl4lms_like.rewards.python_function import is_function, part_block, reward_block
from rl4lms_like.scoring.python_function import scores_text
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.functions import NamedFunction, short_name
from rl4lms_like.system.import_paths import imported
from rl4lms_like.system.registry import Registry
from rl4lms_like.system.wording import raised


def with_function_blocks(mapping: Mapping[str, Any], *, imports: bool) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return a raw mapping with blocks in place of functions and objects, and the errors in them.

    Args:
        mapping: the blocks of a run.
        imports: look up ids that are import paths, which may name functions.
    """
    blocks = dict(mapping)
    issues = []
    if blocks.get("reward_fn") is not None:
        try:
            blocks["reward_fn"] = reward_config(blocks["reward_fn"], imports=imports)
        except ValueError as error:
            issues.append(ConfigIssue("reward_fn", str(error)))

    env = blocks.get("env")
    if isinstance(env, Mapping) and env.get("dialogue") is not None:
        try:
            blocks["env"] = {**env, "dialogue": dialogue_config(env["dialogue"])}
        except ValueError as error:
            issues.append(ConfigIssue("env.dialogue", str(error)))

    evaluation = blocks.get("train_evaluation")
    if not isinstance(evaluation, Mapping):
        return blocks, issues

    blocks["train_evaluation"] = dict(evaluation)
    block_of: dict[str, Callable[[Any], Any]] = {
        "metrics": partial(metric_config, imports=imports),
        "callbacks": callback_config,
    }
    for key, block in block_of.items():
        if not isinstance(evaluation.get(key), list | tuple):
            continue
        entries = []
        for index, entry in enumerate(evaluation[key]):
            try:
                entries.append(block(entry))
            except ValueError as error:
                issues.append(ConfigIssue(f"train_evaluation.{key}.{index}", str(error)))
        blocks["train_evaluation"][key] = entries
    return blocks, issues


def dialogue_config(value: Any) -> Any:
    """Return the block of an environment: an id, an object, a class, or a block with one of these as its `id`.

    Raises:
        ValueError: the class cannot be called.
    """
    if isinstance(value, str):
        return {"id": value}
    block = value if isinstance(value, Mapping) else {"id": value}
    environment = block.get("id")
    if not hasattr(environment, "step"):  # an id, or an error of its own
        return value

    args = block.get("args") or {}
    if inspect.isclass(environment):
        name = environment.__name__
        try:
            environment = environment(**args)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise ValueError(f"{name} cannot be built: {raised(error)}") from error
    elif args:
        raise ValueError(f"args are for a class; this {type(environment).__name__} has been built")
    return {**block, "id": "object", "args": {"object": NamedFunction(environment)}}


def callback_config(value: Any) -> Any:
    """Return the block of a callback: an object, a class, which is called without arguments, or a block already.

    Raises:
        ValueError: it is none of these, or the class cannot be called.
    """
    if isinstance(value, Mapping):
        return value
    if inspect.isclass(value) and issubclass(value, Callback):
        try:
            value = value()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            message = f"{value.__name__}() failed: {raised(error)}; give an object if the class needs arguments"
            raise ValueError(message) from error
    if not isinstance(value, Callback):
        expected = "expected a mapping with the keys id, args; in Python also an object or class derived from Callback"
        raise ValueError(f"{expected}; got {value!r:.60}")
    return {"id": "object", "args": {"object": NamedFunction(value)}}


def reward_config(value: Any, *, imports: bool = True) -> Any:
    """Return the block of a reward; see `reward_block` for functions, lists of them and objects.

    What a file may have is returned as it is, unless it names a function.
    """
    if isinstance(value, list | tuple):
        is_of_python = any(callable(item) or isinstance(item, tuple | RewardPart) for item in value)
        return reward_block(value) if is_of_python else value
    if isinstance(value, str):
        block = _of_import_path({"id": value}, REWARDS) if imports else None
        return block if block and block["id"] != value else value
    block = reward_block(value)
    return _of_import_path(block, REWARDS) if imports else block


def part_config(value: Any) -> Any:
    """Return the block of one of several rewards; that of a function or an object has its name."""
    block = reward_config(value if isinstance(value, str | list) else part_block(value))
    id = value.get("id") if isinstance(value, Mapping) else value
    if isinstance(block, Mapping) and isinstance(id, str) and block["id"] != id:  # the import path of a function
        return {"name": short_name(id), **block}
    return block


def metric_config(value: Any, *, imports: bool = True) -> Any:
    """Return the block of a metric: a function, an object, or a block whose `id` may be a function.

    Raises:
        ValueError: it is a class.
    """
    if isinstance(value, BaseMetric):
        return {"id": "object", "args": {"object": NamedFunction(value)}}
    if is_function(value) or inspect.isclass(value):
        return {"id": "python", "args": {"function": NamedFunction(value)}}
    if isinstance(value, Mapping) and not isinstance(value.get("id"), str) and callable(value.get("id")):
        args = {"function": NamedFunction(value["id"])}
        if value.get("args"):
            args["kwargs"] = value["args"]
        return {**value, "id": "python", "args": args}
    return _of_import_path(value, METRICS) if imports else value


def _of_import_path(block: Any, registry: Registry) -> Any:
    """Return the block of a function if the id of a block is the import path of one; otherwise the block."""
    id = block.get("id") if isinstance(block, Mapping) else None
    if not isinstance(id, str) or ":" not in id or id in registry:
        return block

    # What cannot be imported is reported where components are bound, with the path of the id.
    try:
        target = imported(id)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return block
    # Any other function is refused where components are bound: a config may not have it called.
    if inspect.isclass(target) or not scores_text(target):
        return block

    args = {"function": id}
    if block.get("args"):
        args["kwargs"] = block["args"]
    return {**block, "id": "python", "args": args}
