"""Resolve the components of a config, check their `args` against their signatures, add defaults, and build them.

Arguments with the type of a reward are `{id, args}` too and are bound in the same way, at any depth. So is the
`shaping_fn` that every reward accepts. Works on the raw mapping, so a mistake in one place of a block does not prevent
checks of the others. Loads no model and does not import torch itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rl4lms_like.core.errors import ComponentError, ConfigError, MissingExtraError, Mistake, RL4LMsLikeError
from rl4lms_like.core.registry import Registry
from rl4lms_like.core.schema import at, check_arguments, join, signature_of
from rl4lms_like.core.wording import raised
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.policies.generation_arguments import bind_generation
from rl4lms_like.policies.lora_arguments import LoraArguments
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import RewardFunction, RewardPart
from rl4lms_like.rewards.combine import shaped
from rl4lms_like.training.config.nested_rewards import (
    SHAPING,
    Nested,
    changed,
    check_component,
    name_of,
    plain,
    takes_shaping,
)
from rl4lms_like.training.config.places import FILLED_IN, GENERATION, Slot, slots, targets

_METHODS = {"reward": "__call__", "metric": "compute"}
"""Method that a component must have, by its registry's kind."""


def bind(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
    """Return a copy of the mapping with all `args` coerced to their types, and every mistake in ids and `args`.

    Values without the form of a component are left to the check of the blocks.
    """
    blocks = copy.deepcopy(dict(mapping))
    mistakes = []
    for slot in slots(blocks):
        mistakes += _bind(slot)
    mistakes += _bind_env(blocks)
    _bind_adapters(blocks)
    return blocks, mistakes + _bind_generation(blocks)


def _bind(slot: Slot) -> list[Mistake]:
    id, args = slot.block.get("id"), slot.block.get("args")
    args = {} if args is None else args
    if not isinstance(id, str) or not isinstance(args, Mapping):
        return []
    try:
        target = slot.takes()
    except ConfigError as error:
        return [slot.wrong_id(mistake.message) for mistake in error.mistakes]
    except MissingExtraError:  # not a mistake in the config; building the component reports what to install
        return []
    exclude = FILLED_IN.get(slot.registry.kind, ())
    bound, mistakes = check_component(slot.registry, target, args, join(slot.path, "args"), exclude)
    slot.block["args"] = plain(bound)
    return mistakes


def with_defaults(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a bound mapping with all arguments in the `args` of every component, defaults included."""
    blocks = copy.deepcopy(dict(mapping))
    for slot in slots(blocks):
        try:
            target = slot.takes()
        except (ConfigError, MissingExtraError):  # without a signature the arguments stay as given
            continue
        if slot.path == "alg.policy" and not getattr(targets(blocks).get("alg"), "needs_critic", True):
            slot.block["args"] = {"critic": "none", **(slot.block.get("args") or {})}
        bound, _ = check_component(slot.registry, target, slot.block.get("args") or {}, "")
        bound = {name: value for name, value in bound.items() if name not in FILLED_IN.get(slot.registry.kind, ())}
        slot.block["args"] = _complete(target, changed(bound, _complete_nested), FILLED_IN.get(slot.registry.kind, ()))
    if isinstance(blocks.get("env"), dict):
        blocks["env"]["args"] = _complete(EnvArguments, blocks["env"].get("args") or {})
    return blocks


def _complete(target: Callable[..., Any], args: Mapping[str, Any], exclude: Sequence[str] = ()) -> dict[str, Any]:
    """Return all arguments in the order of the signature, then those accepted by `**kwargs`.

    Defaults that are objects are left out: a config cannot express them.
    """
    defaults = signature_of(target, exclude=exclude).defaults.items()
    everything = {name: value for name, value in defaults if _can_be_written(value)} | dict(args)
    ordered = [argument.name for argument in signature_of(target).arguments if argument.name in everything]
    return {name: everything[name] for name in dict.fromkeys([*ordered, *everything])}


def _complete_nested(nested: Nested, fields: dict[str, Any], path: str) -> dict[str, Any]:
    if nested.kind not in (RewardFunction, RewardPart):
        return _complete(nested.kind, fields)
    options = {"weight": 1.0, "name": fields["name"], **fields} if nested.kind is RewardPart else fields
    try:
        args = _complete(REWARDS.signature(fields["id"]), fields["args"])
    except (ConfigError, MissingExtraError):  # without a signature the arguments stay as given
        args = fields["args"]
    return {"id": fields["id"], "args": args, **{key: options[key] for key in options if key not in ("id", "args")}}


def _can_be_written(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_can_be_written, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_can_be_written, value))
    return value is None or isinstance(value, str | int | float)


def _bind_generation(blocks: dict[str, Any]) -> list[Mistake]:
    mistakes = []
    for place in GENERATION:
        block = at(blocks, place.rpartition(".")[0])
        if isinstance(block, dict) and isinstance(kwargs := block.get("generation_kwargs"), Mapping):
            block["generation_kwargs"], wrong = bind_generation(kwargs, place)
            mistakes += wrong
    return mistakes


def _bind_adapters(blocks: dict[str, Any]) -> None:
    """Coerce the numbers of `peft`; the cross-checks report mistakes in them."""
    for place in ("alg.policy.args", "alg"):
        block = at(blocks, place)
        if isinstance(block, dict) and isinstance(peft := block.get("peft"), Mapping):
            block["peft"] = {**peft, **check_arguments(LoraArguments, peft, place)[0]}


def _bind_env(blocks: dict[str, Any]) -> list[Mistake]:
    env = blocks.get("env")
    args = env.get("args") if isinstance(env, dict) else None
    if not isinstance(env, dict) or not isinstance(args, Mapping | None):
        return []
    env["args"], mistakes = check_arguments(EnvArguments, args or {}, "env.args")
    return mistakes


class _Component(Protocol):
    """The `id` and `args` of a component."""

    @property
    def id(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


def build_component(registry: Registry, config: _Component, kind: str) -> Any:
    """Build a reward or metric of a config.

    Raises:
        ComponentError: it could not be built; the message names it, and for an inner component its config path.
        MissingExtraError: it needs a package that is not installed.
        MissingResourceError: it needs another resource that is missing.
    """
    return _build(registry, config.id, config.args, f"{kind} {config.id!r}")


def _build(registry: Registry, id: str, args: Mapping[str, Any], what: str) -> Any:
    target = registry.signature(id)
    checked, mistakes = check_component(registry, target, args, "args")
    if mistakes:
        raise ComponentError(f"{what} could not be built: {ConfigError(mistakes, 'its arguments')}")

    def build(nested: Nested, fields: dict[str, Any], path: str) -> Any:
        if nested.kind not in (RewardFunction, RewardPart):
            return nested.kind(**fields)
        inner = f"{REWARDS.kind} {fields['id']!r} (args.{path} of the {what})"
        reward = _build_one(REWARDS, fields["id"], nested["args"], fields["args"], inner)
        options = {name: value for name, value in fields.items() if name in ("weight", "name")}
        return reward if nested.kind is RewardFunction else RewardPart(reward, **options)

    return _build_one(registry, id, checked, changed(checked, build), what)


def _build_one(registry: Registry, id: str, checked: Mapping[str, Any], args: dict[str, Any], what: str) -> Any:
    """Build a component from its arguments, in which inner components are built already."""
    shaping = args.pop(SHAPING, None) if takes_shaping(registry, registry.signature(id)) else None
    try:
        component = registry.get(id, args)
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ComponentError(f"{what} could not be built: {raised(error)}") from error
    if not callable(getattr(component, _METHODS[registry.kind], None)):
        said = f"it is a {type(component).__name__}, which has no method {_METHODS[registry.kind]!r}"
        raise ComponentError(f"{what} is not a {registry.kind}: {said}")
    if shaping is None:
        return component
    given = checked[SHAPING]
    name = name_of(given["id"]) if isinstance(given, Nested) else type(given).__name__
    return shaped(component, name_of(id), shaping, name)
