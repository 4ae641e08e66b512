"""The components of a config, looked up and their `args` held against their signatures. Loads no model, no torch.

What their signatures type as rewards is `{id, args}` as well, and is bound in the same way, at any depth; so is the
`shaping_fn` that every reward takes. Works on the raw mapping, so that a block that is wrong in one place is still
checked in all others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl4lms_like.core.errors import ConfigError, MissingExtraError, Mistake
from rl4lms_like.core.import_paths import NamesFunction, RefusedImportError, imported
from rl4lms_like.core.registry import Registry
from rl4lms_like.core.schema import at, check_arguments, join, keys_are_text, signature_of, unknown_key
from rl4lms_like.core.wording import shown
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.policies.generation_arguments import bind_generation
from rl4lms_like.policies.lora_arguments import LoraArguments
from rl4lms_like.training.config.nested import (
    ANY_REWARD,
    SHAPING,
    Block,
    Inner,
    Many,
    Named,
    Shape,
    as_component,
    is_optional,
    joined_block,
    mapped,
    shape_of,
    split_block,
    takes_shaping,
    wrong_kind,
)
from rl4lms_like.training.config.places import FILLED_IN, GENERATION, Slot, slots, targets


def bind(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
    """A copy of the mapping with all `args` coerced to their types, and every mistake in ids and `args`.

    What is not shaped like a component at all is left to the check of the blocks.
    """
    blocks = copy.deepcopy(dict(mapping))
    mistakes = []
    for slot in slots(blocks):
        mistakes += _bind(slot)
    mistakes += _bind_env(blocks)
    _bind_adapters(blocks)
    return blocks, mistakes + _bind_generation(blocks)


def _bind(slot: Slot) -> list[Mistake]:
    id, args = slot.block.get("id"), _arguments(slot.block)
    if not isinstance(id, str) or not isinstance(args, Mapping):
        return []
    try:
        target = slot.takes()
    except ConfigError as error:
        return [slot.wrong_id(mistake.message) for mistake in error.mistakes]
    except MissingExtraError:  # nothing is wrong with the config; building the component says what to install
        return []
    where, args = join(slot.path, "args"), dict(args)
    also = (SHAPING,) if takes_shaping(slot.registry, target) else ()
    shaping = args.pop(SHAPING, None) if also else None
    exclude = FILLED_IN.get(slot.registry.kind, ())
    bound, mistakes = check_arguments(target, args, where, exclude=exclude, also=also, first=_nested)
    if shaping is not None:
        bound[SHAPING], wrong = _bind_inner(shaping, ANY_REWARD, join(where, SHAPING))
        mistakes += wrong
    slot.block["args"] = bound
    return mistakes


def _arguments(block: Mapping[str, Any]) -> Any:
    """What stands as `args`; nothing there is no arguments, but an empty text or a 0 is not."""
    return {} if block.get("args") is None else block["args"]


def _nested(value: Any, annotation: Any, path: str) -> tuple[Any, list[Mistake]] | None:
    """The answer of `check_value` for types that hold components, None for all others."""
    if any(isinstance(rule, NamesFunction) for rule in getattr(annotation, "__metadata__", ())):
        return _bind_import_path(value, path)
    shape = shape_of(annotation)
    if shape is None:
        return None
    return (None, []) if value is None and is_optional(annotation) else _bind_shape(value, shape, path)


def _bind_import_path(value: Any, path: str) -> tuple[Any, list[Mistake]] | None:
    """A function's import path, if it leads somewhere; what is no path is left to the function's own checks."""
    if not isinstance(value, str) or ":" not in value:
        return None
    try:
        imported(value)
    except MissingExtraError:
        return value, []
    except RefusedImportError as error:
        return None, [Mistake(path, f"{value!r} is refused: {error}")]
    except Exception as error:  # importing a user's module runs the user's code
        return None, [Mistake(path, f"cannot import {value!r}: {type(error).__name__}: {error}")]
    return value, []


def _bind_shape(value: Any, shape: Shape, path: str) -> tuple[Any, list[Mistake]]:
    if isinstance(shape, Inner):
        return _bind_inner(value, shape, path)
    if isinstance(shape, Block):
        return _bind_block(value, shape, path)
    if isinstance(shape, Named):
        if not isinstance(value, Mapping):
            return None, [Mistake(path, f"expected a mapping from names to components, got {shown(value)}")]
        if others := [name for name in value if not isinstance(name, str)]:
            return None, [Mistake(path, keys_are_text(others))]
        bound = {name: _bind_shape(item, shape.item, join(path, name)) for name, item in value.items()}
        return {name: item for name, (item, _) in bound.items()}, [one for _, wrong in bound.values() for one in wrong]
    if not isinstance(value, list):
        return None, [Mistake(path, f"expected a list, got {shown(value)}")]
    items = [_bind_shape(item, shape.item, join(path, index)) for index, item in enumerate(value)]
    mistakes = [one for _, wrong in items for one in wrong]
    return [item for item, _ in items], mistakes + _same_names(value, shape, path)


def _bind_inner(value: Any, shape: Inner, path: str) -> tuple[Any, list[Mistake]]:
    """A component as `{id, args}`; a config may give the id alone."""
    kind = shape.registry.kind
    block = as_component(value)
    if not isinstance(block, Mapping):
        return None, [Mistake(path, f"expected the id of a {kind}, or a mapping with id and args; got {shown(value)}")]
    block = dict(block)
    mistakes = [Mistake(join(path, key), unknown_key(key, ("id", "args"))) for key in block if key not in _COMPONENT]
    if not isinstance(block.get("id"), str):
        said = f"expected the id of a {kind}, got {shown(block['id'])}" if "id" in block else f"missing; a {kind}'s id"
        return None, [*mistakes, Mistake(join(path, "id"), said)]
    if not isinstance(_arguments(block), Mapping):
        return None, [*mistakes, Mistake(join(path, "args"), f"expected a mapping, got {shown(block['args'])}")]
    block["args"] = dict(_arguments(block))
    slot = Slot(path, block, shape.registry, path if isinstance(value, str) else None)
    if (misfit := wrong_kind(block, shape)) is not None:
        mistakes.append(slot.wrong_id(misfit))
    return block, mistakes + _bind(slot)


_COMPONENT = ("id", "args")


def _bind_block(value: Any, block: Block, path: str) -> tuple[Any, list[Mistake]]:
    """A dataclass that holds components, as the mapping that a config writes."""
    names = [argument.name for argument in signature_of(block.kind).arguments]
    names = [*_COMPONENT, *(name for name in names if name != block.inline[0])] if block.inline else names
    if not isinstance(value, Mapping) and not (block.inline and isinstance(value, str)):
        return None, [Mistake(path, f"expected a mapping with the keys {', '.join(names)}; got {shown(value)}")]
    given = dict(as_component(value))
    mistakes = [Mistake(join(path, key), unknown_key(key, names)) for key in given if key not in names]
    fields = split_block({key: item for key, item in given.items() if key in names}, block)
    inline = {}
    if block.inline:
        field = block.inline[0]
        own, shape = fields.pop(field, {}), block.fields[field]
        assert isinstance(shape, Inner)
        inline[field], wrong = _bind_inner(value if isinstance(value, str) else own, shape, path)
        mistakes += wrong
    bound, wrong = check_arguments(block.kind, fields, path, exclude=tuple(inline), first=_nested)
    return joined_block(block, inline | bound), mistakes + wrong


def _same_names(value: list[Any], shape: Many, path: str) -> list[Mistake]:
    """The items of a list whose name another one has already."""
    if not isinstance(shape.item, Block) or shape.item.inline is None:
        return []
    mistakes: list[Mistake] = []
    taken: dict[str, int] = {}
    field = shape.item.inline[1]
    for index, item in enumerate(value):
        name = split_block(item, shape.item).get(field) if isinstance(item, str | Mapping) else None
        if isinstance(name, str) and name in taken:
            said = f"{name!r} is the name of {join(path, taken[name])} already; give each a name of its own"
            mistakes.append(Mistake(join(join(path, index), field), said))
        elif isinstance(name, str):
            taken[name] = index
    return mistakes


def with_defaults(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a bound mapping in which the `args` of every component hold all arguments, defaults included."""
    blocks = copy.deepcopy(dict(mapping))
    for slot in slots(blocks):
        try:
            target = slot.takes()
        except (ConfigError, MissingExtraError):  # an unknown component shows what it was given
            continue
        if slot.path == "alg.policy" and not getattr(targets(blocks).get("alg"), "needs_critic", True):
            slot.block["args"] = {"critic": "none", **(slot.block.get("args") or {})}
        exclude = FILLED_IN.get(slot.registry.kind, ())
        slot.block["args"] = _complete(target, slot.block.get("args") or {}, exclude, slot.registry)
    if isinstance(blocks.get("env"), dict):
        blocks["env"]["args"] = _complete(EnvArguments, blocks["env"].get("args") or {})
    return blocks


def _complete(
    target: Callable[..., Any], args: Mapping[str, Any], exclude: Sequence[str] = (), registry: Registry | None = None
) -> dict[str, Any]:
    """All arguments in the order of the signature, then those it takes by `**kwargs`; inner components in full too.

    Without defaults that are objects: no config can say them.
    """
    defaults = signature_of(target).defaults.items()
    everything = {name: value for name, value in defaults if _can_be_written(value)} | dict(args)
    everything = {name: value for name, value in everything.items() if name not in exclude}
    ordered = [argument.name for argument in signature_of(target).arguments if argument.name in everything]
    complete = {name: everything[name] for name in [*ordered, *(name for name in everything if name not in ordered)]}
    for argument in signature_of(target).arguments:
        shape = shape_of(argument.annotation)
        if shape is not None and argument.name in complete:
            complete[argument.name] = mapped(complete[argument.name], shape, _complete_inner, "", _complete_block)
    if registry is not None and SHAPING in complete and takes_shaping(registry, target):
        complete[SHAPING] = mapped(complete[SHAPING], ANY_REWARD, _complete_inner, "", _complete_block)
    return complete


def _complete_inner(component: dict[str, Any], shape: Inner, path: str) -> dict[str, Any]:
    try:
        target = shape.registry.signature(component["id"])
    except (ConfigError, MissingExtraError):  # an unknown component shows what it was given
        return component
    return {"id": component["id"], "args": _complete(target, component.get("args") or {}, (), shape.registry)}


def _complete_block(block: Block, fields: dict[str, Any]) -> dict[str, Any]:
    everything = signature_of(block.kind).defaults | fields
    in_order = [argument.name for argument in signature_of(block.kind).arguments if argument.name in everything]
    return joined_block(block, {name: everything[name] for name in in_order})


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
    """Reads the numbers of `peft`; what is wrong with them is said by the cross-checks."""
    for place in ("alg.policy.args", "alg"):
        block = at(blocks, place)
        if isinstance(block, dict) and isinstance(peft := block.get("peft"), Mapping):
            block["peft"] = {**peft, **check_arguments(LoraArguments, peft, place)[0]}


def _bind_env(blocks: dict[str, Any]) -> list[Mistake]:
    env = blocks.get("env")
    if not isinstance(env, dict) or not isinstance(_arguments(env), Mapping):
        return []
    env["args"], mistakes = check_arguments(EnvArguments, _arguments(env), "env.args")
    return mistakes
