"""Components from a config's `{id, args}`, the inner ones first. Loads no torch of its own.

reward_fn: {id: combine, args: {rewards: [{id: meteor}, {id: length_penalty, args: ...}]}}
    MeteorRewardFunction ─┐
    LengthPenalty        ─┴─ CombinedReward
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rl4lms_like.core.errors import ComponentError, RL4LMsLikeError
from rl4lms_like.core.registry import Registry
from rl4lms_like.core.schema import signature_of
from rl4lms_like.core.wording import raised
from rl4lms_like.rewards.combine import shaped
from rl4lms_like.training.config.nested import (
    ANY_REWARD,
    SHAPING,
    Block,
    Inner,
    mapped,
    name_of,
    shape_of,
    takes_shaping,
)

_METHODS = {"reward": "__call__", "metric": "compute"}
"""What a component is asked for, by its registry's kind."""


class _Component(Protocol):
    """A config's `id` and `args`."""

    @property
    def id(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


def build_component(registry: Registry, config: _Component, kind: str) -> Any:
    """A reward or metric of a config.

    Raises:
        ComponentError: it could not be built; says which, and of an inner component where it stands.
        MissingExtraError: it needs a package that is not installed.
        MissingResourceError: it needs something else that is not here.
    """
    return _build(registry, config.id, config.args, f"{kind} {config.id!r}")


def _build(registry: Registry, id: str, args: Mapping[str, Any], what: str) -> Any:
    target, args = registry.signature(id), dict(args)
    shaping = args.pop(SHAPING, None) if takes_shaping(registry, target) else None

    def build_inner(component: dict[str, Any], shape: Inner, path: str) -> Any:
        inner = f"{shape.registry.kind} {component['id']!r} ({path} of the {what})"
        return _build(shape.registry, component["id"], component.get("args") or {}, inner)

    for argument in signature_of(target).arguments:
        shape = shape_of(argument.annotation)
        if shape is not None and argument.name in args:
            args[argument.name] = mapped(args[argument.name], shape, build_inner, f"args.{argument.name}", _make)
    inner = None if shaping is None else mapped(shaping, ANY_REWARD, build_inner, f"args.{SHAPING}")
    try:
        component = registry.get(id, args)
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ComponentError(f"{what} could not be built: {raised(error)}") from error
    if not callable(getattr(component, _METHODS[registry.kind], None)):
        said = f"it is a {type(component).__name__}, which has no method {_METHODS[registry.kind]!r}"
        raise ComponentError(f"{what} is no {registry.kind}: {said}")
    if shaping is None:
        return component
    return shaped(component, name_of(id), inner, _shaping_name(shaping))


def _make(block: Block, fields: dict[str, Any]) -> Any:
    return block.kind(**fields)


def _shaping_name(shaping: Any) -> str:
    """What a config calls it; of an object given in Python, its class."""
    if isinstance(shaping, str | Mapping):
        return name_of(shaping if isinstance(shaping, str) else shaping["id"])
    return type(shaping).__name__
