"""The components of a config, looked up and their `args` held against their signatures. Loads no model, no torch.

    reward_fn                  REWARDS
    datapool                   DATA_POOLS
    train_evaluation.metrics   METRICS
    env                        TextGenEnv
    alg, alg.policy            ALGORITHMS, POLICIES

Works on the raw mapping, so that a block that is wrong in one place is still checked in all others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.core.errors import ConfigError, MissingExtraError, Mistake
from rl4lms_like.core.registry import Registry
from rl4lms_like.core.schema import check_arguments, join, signature_of
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.metrics import METRICS
from rl4lms_like.policies import POLICIES
from rl4lms_like.rewards import REWARDS

REGISTRIES: dict[str, Registry] = {
    "data_pools": DATA_POOLS,
    "rewards": REWARDS,
    "metrics": METRICS,
    "policies": POLICIES,
    "algorithms": ALGORITHMS,
}
"""Every registry, by the name that the command line gives it."""

FILLED_IN: dict[str, tuple[str, ...]] = {
    "data pool": ("split",),
    "policy": (
        "observation_space",
        "action_space",
        "lr_schedule",
        "tokenizer",
        "optimizer_class",
        "use_sde",
        "use_reference",
        "device",
        "special_token_ids",
        "state_dict",
    ),
    "algorithm": (
        "policy",
        "env",
        "policy_kwargs",
        "kl_controller",
        "norm_reward",
        "tracker",
        "_init_setup_model",
    ),
}
"""Arguments that the library gives its components itself, by the registry's kind."""


@dataclass(frozen=True)
class _Slot:
    """A place in the config that holds a component."""

    path: str
    block: dict[str, Any]
    registry: Registry


def bind(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
    """A copy of the mapping with all `args` coerced to their types, and every mistake in ids and `args`.

    What is not shaped like a component at all is left to the check of the blocks.
    """
    blocks = copy.deepcopy(dict(mapping))
    mistakes = []
    for slot in _slots(blocks):
        mistakes += _bind(slot)
    mistakes += _bind_env(blocks)
    return blocks, mistakes


def _bind(slot: _Slot) -> list[Mistake]:
    id, args = slot.block.get("id"), slot.block.get("args") or {}
    if not isinstance(id, str) or not isinstance(args, Mapping):
        return []
    try:
        target = _takes(slot)
    except ConfigError as error:
        return [Mistake(join(slot.path, "id"), mistake.message) for mistake in error.mistakes]
    except MissingExtraError:  # nothing is wrong with the config; building the component says what to install
        return []
    exclude = FILLED_IN.get(slot.registry.kind, ())
    bound, mistakes = check_arguments(target, args, join(slot.path, "args"), exclude=exclude)
    slot.block["args"] = bound
    return mistakes


def with_defaults(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a bound mapping in which the `args` of every component hold all arguments, defaults included."""
    blocks = copy.deepcopy(dict(mapping))
    for slot in _slots(blocks):
        try:
            target = _takes(slot)
        except (ConfigError, MissingExtraError):  # an unknown component shows what it was given
            continue
        exclude = FILLED_IN.get(slot.registry.kind, ())
        slot.block["args"] = _complete(target, slot.block.get("args") or {}, exclude)
    if isinstance(blocks.get("env"), dict):
        blocks["env"]["args"] = _complete(EnvArguments, blocks["env"].get("args") or {})
    return blocks


def _takes(slot: _Slot) -> Callable[..., Any]:
    """What a component's `args` go to; an algorithm of the user may name its `arguments_class`, as ours do."""
    target = slot.registry.signature(slot.block["id"])
    return getattr(target, "arguments_class", target)


def targets(blocks: dict[str, Any]) -> dict[str, Any]:
    """What the `args` of each component go to, by its path; without those of which that cannot be said."""
    found = {}
    for slot in _slots(blocks):
        if not isinstance(slot.block.get("id"), str):
            continue
        try:
            found[slot.path] = _takes(slot)
        except (ConfigError, MissingExtraError):  # reported where its `args` are bound, or where it is built
            continue
    return found


def _complete(target: Callable[..., Any], args: Mapping[str, Any], exclude: Sequence[str] = ()) -> dict[str, Any]:
    """All arguments in the order of the signature, then those it takes by `**kwargs`."""
    everything = signature_of(target).defaults | dict(args)
    everything = {name: value for name, value in everything.items() if name not in exclude}
    ordered = [argument.name for argument in signature_of(target).arguments if argument.name in everything]
    return {name: everything[name] for name in [*ordered, *(set(everything) - set(ordered))]}


def _bind_env(blocks: dict[str, Any]) -> list[Mistake]:
    env = blocks.get("env")
    if not isinstance(env, dict) or not isinstance(env.get("args") or {}, Mapping):
        return []
    env["args"], mistakes = check_arguments(EnvArguments, env.get("args") or {}, "env.args")
    return mistakes


def _slots(blocks: dict[str, Any]) -> Iterator[_Slot]:
    alg = blocks.get("alg")
    places = [("reward_fn", blocks.get("reward_fn"), REWARDS), ("datapool", blocks.get("datapool"), DATA_POOLS)]
    if isinstance(alg, dict) and "supervised" not in str(alg.get("id")):
        places += [("alg", alg, ALGORITHMS), ("alg.policy", alg.get("policy"), POLICIES)]
    evaluation = blocks.get("train_evaluation")
    metrics = evaluation.get("metrics") if isinstance(evaluation, dict) else None
    for index, metric in enumerate(metrics if isinstance(metrics, list) else []):
        places.append((f"train_evaluation.metrics.{index}", metric, METRICS))
    for path, block, registry in places:
        if isinstance(block, dict):
            yield _Slot(path, block, registry)
