"""Where signatures have components inside components, and what a config writes there.

    annotation                          shape              config
    RewardFunction | None               Inner              id, or {id, args}
    list[BatchedRewardFunction]         Many of Inner      [id, {id, args}]
    dict[str, AnyReward]                Named of Inner     {name: {id, args}}
    list[RewardPart]  (Inline reward)   Many of Block      [{id, args, weight, name}]

Bound, every component is `{id, args}`; `mapped` puts something else in the place of each, from the inside out.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rl4lms_like.core.errors import ConfigError, MissingExtraError
from rl4lms_like.core.nested import ComponentOf, Inline
from rl4lms_like.core.registry import Registry
from rl4lms_like.core.schema import signature_of
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction
from rl4lms_like.rewards.combine import CombinedReward

SHAPING = "shaping_fn"
"""The argument that every reward takes in a config: another reward, whose value is added."""


@dataclass(frozen=True)
class Inner:
    """One component.

    Args:
        registry: where its id is looked up.
        bases: it is one of these.
    """

    registry: Registry
    bases: tuple[type, ...]


@dataclass(frozen=True)
class Many:
    """A list."""

    item: Shape


@dataclass(frozen=True)
class Named:
    """A mapping by names of one's own."""

    item: Shape


@dataclass(frozen=True)
class Block:
    """A dataclass some of whose fields hold components.

    Args:
        kind: the dataclass.
        fields: those fields.
        inline: the one whose `id` and `args` stand in the block itself, and the field that takes its id as a name.
    """

    kind: type
    fields: Mapping[str, Shape]
    inline: tuple[str, str] | None = None


Shape: TypeAlias = Inner | Many | Named | Block

_KINDS = {
    "reward": Inner(REWARDS, (RewardFunction, BatchedRewardFunction)),
    "batched reward": Inner(REWARDS, (BatchedRewardFunction,)),
}

ANY_REWARD = _KINDS["reward"]
"""What stands as `shaping_fn`."""


def shape_of(annotation: Any) -> Shape | None:
    """The components in a type; None if there are none."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        kinds = [rule.kind for rule in args[1:] if isinstance(rule, ComponentOf)]
        return _KINDS[kinds[0]] if kinds else shape_of(args[0])
    if origin in (typing.Union, types.UnionType):
        return _shape_of_union([shape_of(option) for option in args if option is not type(None)])
    if origin is dict or (inspect.isclass(origin) and issubclass(origin, Mapping)):
        return Named(item) if len(args) == 2 and (item := shape_of(args[1])) else None
    if origin in (list, tuple) or (inspect.isclass(origin) and issubclass(origin, Sequence)):
        items = set(args) - {Ellipsis}  # a tuple of different types is none of ours
        return Many(item) if len(items) == 1 and (item := shape_of(args[0])) else None
    if inspect.isclass(annotation) and issubclass(annotation, (RewardFunction, BatchedRewardFunction)):
        return Inner(REWARDS, (annotation,))
    return _shape_of_block(annotation) if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation) else None


def is_optional(annotation: Any) -> bool:
    """Whether null may stand there."""
    return type(None) in typing.get_args(annotation)


def takes_shaping(registry: Registry, target: Callable[..., Any]) -> bool:
    """Whether the library adds a `shaping_fn`: to any reward, unless it has a parameter of that name itself."""
    return registry is REWARDS and SHAPING not in {argument.name for argument in signature_of(target).arguments}


def wrong_kind(component: Mapping[str, Any], shape: Inner) -> str | None:
    """What to say of a reward that is of another kind than is asked for; None where it fits, or cannot be told."""
    try:
        target: Any = shape.registry.resolve(component["id"])
    except (ConfigError, MissingExtraError):  # said where its `args` are bound, or where it is built
        return None
    if not inspect.isclass(target) or not issubclass(target, ANY_REWARD.bases):
        return None
    if (component.get("args") or {}).get(SHAPING) is not None and takes_shaping(shape.registry, target):
        target = CombinedReward
    if issubclass(target, shape.bases):
        return None
    expected = " or ".join(base.__name__ for base in shape.bases)
    return f"expected a {expected}; {component['id']!r} is a {_role(target)}"


def _role(target: type) -> str:
    if issubclass(target, CombinedReward):
        return "combination of rewards, which looks at tokens"
    return next(base.__name__ for base in ANY_REWARD.bases if issubclass(target, base))


def name_of(id: str) -> str:
    """What a component is called by default: its id; of an import path, the last part."""
    return id.rpartition(":")[2]


def as_component(value: Any) -> Any:
    """`{id: ...}` where a config has only the id."""
    return {"id": value} if isinstance(value, str) else value


def mapped(
    value: Any,
    shape: Shape,
    change: Callable[[dict[str, Any], Inner, str], Any],
    path: str,
    make: Callable[[Block, dict[str, Any]], Any] = lambda block, fields: fields,
) -> Any:
    """A bound value with `change(component, shape, path)` in the place of each component, `make` in that of each block.

    What is not a component is left as it is: null, or an object given in Python.
    """
    if isinstance(shape, Many) and isinstance(value, list | tuple):
        return [mapped(item, shape.item, change, f"{path}.{index}", make) for index, item in enumerate(value)]
    if isinstance(shape, Named) and isinstance(value, Mapping):
        return {name: mapped(item, shape.item, change, f"{path}.{name}", make) for name, item in value.items()}
    if isinstance(shape, Inner) and isinstance(value, str | Mapping):
        return change(dict(as_component(value)), shape, path)
    if isinstance(shape, Block) and isinstance(value, str | Mapping):
        fields = split_block(value, shape)
        for name, field in shape.fields.items():
            if name in fields:
                inside = path if shape.inline and name == shape.inline[0] else f"{path}.{name}"
                fields[name] = mapped(fields[name], field, change, inside, make)
        return make(shape, fields)
    return value


def split_block(value: Any, block: Block) -> dict[str, Any]:
    """The fields of a block; an inline component as one field, which gives the name its default."""
    fields = dict(as_component(value))
    if block.inline is None:
        return fields
    field, name = block.inline
    component = {key: fields.pop(key) for key in ("id", "args") if key in fields}
    if component:
        fields[field] = component
    if fields.get(name) is None and isinstance(component.get("id"), str):
        fields[name] = name_of(component["id"])
    return fields


def joined_block(block: Block, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `split_block`: what a config writes."""
    flat = dict(fields)
    inline = flat.pop(block.inline[0], None) if block.inline else None
    return {**inline, **flat} if isinstance(inline, Mapping) else flat


def _shape_of_union(shapes: list[Shape | None]) -> Shape | None:
    inner = [shape for shape in shapes if isinstance(shape, Inner)]
    if inner and len(inner) == len(shapes):
        return Inner(inner[0].registry, tuple(base for shape in inner for base in shape.bases))
    return shapes[0] if len(shapes) == 1 else None


def _shape_of_block(kind: type) -> Block | None:
    annotations = {argument.name: argument.annotation for argument in signature_of(kind).arguments}
    fields = {name: shape for name, annotation in annotations.items() if (shape := shape_of(annotation))}
    inline = [
        (name, rule.name_field)
        for name in fields
        for rule in typing.get_args(annotations[name])[1:]
        if isinstance(rule, Inline)
    ]
    return Block(kind, fields, inline[0] if inline else None) if fields else None
