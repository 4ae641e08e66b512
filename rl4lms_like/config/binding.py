"""Components of a config: their `args` checked against their signatures, defaults added, and the objects built.

A `ComponentConfig` is a block with `id` and `args`; its class says in which registry the id is. Its `args` stay as
written, with numbers coerced; `arguments` is their typed view, if the component describes them by a dataclass.

Arguments with the type of a reward are components too and are checked in the same way, at any depth. So is the
`shaping_fn` that every reward accepts.

    annotation                            config
    RewardFunction | None                 id, or {id, args}
    list[BatchedRewardFunction]           [id, {id, args}]
    dict[str, AnyReward]                  {name: {id, args}}
    list[RewardPart]                      [{id, args, weight, name}]
    a dataclass with such fields          {reward: {id, args}, ...}

A checked reward is a `Nested`: the mapping of the config, with the class of the object to build. Loads no model and
does not import torch itself.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import MinLen
from pydantic import PlainValidator

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.callbacks import CALLBACKS
from rl4lms_like.config.functions import part_config, reward_config
from rl4lms_like.data_pools import DATA_POOLS, SAMPLERS
from rl4lms_like.engines import ENGINES
from rl4lms_like.envs import ENVIRONMENTS
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.metrics import METRICS
from rl4lms_like.policies import POLICIES
from rl4lms_like.post_processors import POST_PROCESSORS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction, RewardPart
from rl4lms_like.rewards.combine import CombinedReward, shaped
from rl4lms_like.system.errors import ComponentError, ConfigError, ConfigIssue, MissingExtraError, RL4LMsLikeError
from rl4lms_like.system.numbers import Finite
from rl4lms_like.system.registry import Registry
from rl4lms_like.system.schema import (
    Block,
    ComponentOf,
    RefusedError,
    at,
    check_arguments,
    check_block,
    check_value,
    join,
    make_block,
    read_block,
    signature_of,
)
from rl4lms_like.system.wording import raised, shown

REGISTRIES: dict[str, Registry] = {
    "data_pools": DATA_POOLS,
    "samplers": SAMPLERS,
    "rewards": REWARDS,
    "metrics": METRICS,
    "callbacks": CALLBACKS,
    "post_processors": POST_PROCESSORS,
    "environments": ENVIRONMENTS,
    "policies": POLICIES,
    "engines": ENGINES,
    "algorithms": ALGORITHMS,
    "objectives": OBJECTIVES,
}
"""Registries by their name on the command line."""

POST_PROCESSING = "alg.generation_kwargs.post_processing_fn"
"""Config path of the post-processor of a supervised or preference run's texts."""

FILLED_IN: dict[str, tuple[str, ...]] = {
    "data pool": ("split",),
    "sampler": ("items", "seed"),
    "policy": (
        *("observation_space", "action_space", "lr_schedule", "tokenizer", "optimizer_class", "use_sde"),
        *("use_reference", "device", "special_token_ids", "state_dict"),
    ),
    "algorithm": (*("policy", "env", "policy_kwargs", "kl_controller", "norm_reward", "tracker", "_init_setup_model"),),
}
"""Arguments that the library passes to components itself, by the registry's kind."""

SHAPING = "shaping_fn"
"""Argument that every reward accepts in a config: another reward, whose value is added."""

_REWARDS = (RewardFunction, BatchedRewardFunction)

RunKind = Literal["on_policy", "supervised", "preference"]

Arguments = dict[str, Any]
"""Keyword arguments of a component."""


@dataclass(frozen=True, kw_only=True)
class ComponentConfig(Block):
    """Component given by id.

    Args:
        id: an id of the registry, or an import path `package.module:Name`.
        args: arguments of the component.
    """

    registry: ClassVar[Registry]
    """Registry of the id."""

    id: str
    args: Arguments = field(default_factory=dict)

    @cached_property
    def arguments(self) -> Any:
        """Typed view of `args`: an object of the component's `arguments_class`; None if it has another signature."""
        target = self.registry.arguments_class(self.id)
        if not (inspect.isclass(target) and issubclass(target, Block)):
            return None
        return read_block(target, self.args)[0]

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        if isinstance(self.arguments, Block):
            yield from (issue.below("args") for issue in self.arguments.issues())


def component_fields(block: type[ComponentConfig], value: Any) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return the valid fields of a component's block, with its `args` checked, and the errors relative to it."""
    value = {} if value is None else value
    fields, issues = check_block(block, value, special_types)
    id = fields.get("id")
    if not isinstance(id, str) or (isinstance(value, Mapping) and "args" in value and "args" not in fields):
        return fields, issues

    try:
        target = block.registry.arguments_class(id)
    except ConfigError as error:
        fields.pop("args", None)  # unchecked
        return fields, [*issues, *(ConfigIssue("id", issue.message) for issue in error.issues)]
    if target is None:
        return {**fields, "args": fields.get("args", {})}, issues
    checked, args_issues = check_component(block.registry, target, fields.get("args", {}), "args")
    fields["args"] = plain(checked)
    if args_issues:
        del fields["args"]
    return fields, [*issues, *args_issues]


def special_types(annotation: Any) -> Callable[[Any], Any] | None:
    """Return the function that makes the component of a block's type; None for any other type."""
    if inspect.isclass(annotation) and issubclass(annotation, ComponentConfig):
        return partial(_component_config, annotation)
    return None


def _component_config(block: type[ComponentConfig], value: Any) -> ComponentConfig:
    if isinstance(value, block):
        return value
    fields, issues = component_fields(block, value)
    if issues:
        raise RefusedError(*issues)
    return make_block(block, fields)


def checked_post_processing(generation_kwargs: Arguments) -> Arguments:
    """Return the generation arguments of a supervised or preference run with its post-processor checked.

    Raises:
        RefusedError: lists all errors.
    """
    key = "post_processing_fn"
    value = generation_kwargs.get(key)
    if value is None:
        return generation_kwargs
    if not isinstance(value, Mapping) or not isinstance(value.get("id"), str):
        raise RefusedError(ConfigIssue(key, f"expected null or a mapping with id; got {shown(value)}"))
    fields, issues = component_fields(PostProcessorConfig, value)
    if issues:
        raise RefusedError(*(issue.below(key) for issue in issues))
    return {**generation_kwargs, key: fields}


class PostProcessorConfig(ComponentConfig):
    """Function that changes the texts of a supervised or preference run."""

    registry = POST_PROCESSORS


# --- rewards in arguments -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reward:
    """A reward's block."""

    id: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part(_Reward):
    """The block of a `RewardPart`."""

    weight: Finite = 1.0
    name: Annotated[str, MinLen(1)] | None = None


class Nested(dict[str, Any]):
    """Mapping of a config that describes an object of a class, its `kind`.

    It has the `id` and `args` of a reward, also `weight` and `name` of a `RewardPart`, or the fields of a dataclass.
    """

    def __init__(self, fields: Mapping[str, Any], kind: type) -> None:
        super().__init__(fields)
        self.kind = kind


def plain(value: Any) -> Any:
    """Return a checked value with a plain mapping in place of each `Nested` and of each dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if type(value) in (dict, Nested) else value


def changed(value: Any, change: Callable[[Nested, dict[str, Any], str], Any], path: str = "") -> Any:
    """Return a checked value with `change(nested, its fields, path)` in place of each `Nested`, inner ones first."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # a named tuple holds no component
        return type(value)(changed(item, change, join(path, index)) for index, item in enumerate(value))
    if type(value) not in (dict, Nested):
        return value
    fields = {key: changed(item, change, join(path, key)) for key, item in value.items()}
    return change(value, fields, path) if isinstance(value, Nested) else fields


def takes_shaping(registry: Registry, target: Callable[..., Any]) -> bool:
    """Return whether the library adds a `shaping_fn`: to any reward that has no parameter of that name."""
    return registry is REWARDS and SHAPING not in {argument.name for argument in signature_of(target).arguments}


def name_of(id: str) -> str:
    """Return the default name of a component: its id, or the last part of an import path."""
    return id.rpartition(":")[2]


def check_component(
    registry: Registry, target: Callable[..., Any], args: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Check the arguments of a component against its signature, except those that the library fills in.

    Returns:
        The valid arguments, coerced to their types, with a `Nested` for each inner reward; and the errors, below
        `path`.
    """
    # The library adds the reward of a `shaping_fn`; the component itself never gets it.
    also = (SHAPING,) if takes_shaping(registry, target) else ()
    passed_on = {name: value for name, value in args.items() if name not in also}
    exclude = FILLED_IN.get(registry.kind, ())
    checked, issues = check_arguments(target, passed_on, path, exclude=exclude, also=also, special=_validator_of)

    if also and args.get(SHAPING) is not None:
        try:
            checked[SHAPING] = _reward(_REWARDS, args[SHAPING])
        except RefusedError as refused:
            issues += [issue.below(join(path, SHAPING)) for issue in refused.issues]
    return checked, issues


def _validator_of(annotation: Any) -> Callable[[Any], Any] | None:
    """Return the function that validates a type of this module's table; None for any other type."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        bases = tuple(base for base in _REWARDS if ComponentOf(base.__name__) in annotation.__metadata__)
        return partial(_reward, bases) if bases else _validator_of(typing.get_args(annotation)[0])

    # A reward, or one of several kinds of rewards, or null.
    options = typing.get_args(annotation) if origin in (typing.Union, types.UnionType) else (annotation,)
    if _are_rewards(options):
        return partial(_reward, options)

    if annotation is RewardPart:
        return _part
    if origin is list and _validator_of(typing.get_args(annotation)[0]) is _part:
        return _parts
    return partial(_block, annotation) if _is_block_of_rewards(annotation) else None


def _are_rewards(options: Sequence[Any]) -> bool:
    """Return whether the options of a type are classes of rewards, or such classes and null."""
    kinds = [option for option in options if option is not type(None)]
    return bool(kinds) and all(inspect.isclass(kind) and issubclass(kind, _REWARDS) for kind in kinds)


def _is_block_of_rewards(annotation: Any) -> bool:
    """Return whether a type is a dataclass with a reward in one of its fields; `schema` builds any other dataclass."""
    if not inspect.isclass(annotation) or not dataclasses.is_dataclass(annotation):
        return False
    return any(map(_mentions_reward, typing.get_type_hints(annotation, include_extras=True).values()))


def _mentions_reward(annotation: Any) -> bool:
    if inspect.isclass(annotation) and (issubclass(annotation, _REWARDS) or annotation is RewardPart):
        return True
    return any(map(_mentions_reward, typing.get_args(annotation))) or _is_block_of_rewards(annotation)


def _reward(bases: tuple[type, ...], value: Any) -> Any:
    """Validate a reward: `{id, args}` or the id alone in a config, or an object in Python."""
    if value is None and type(None) in bases:
        return None
    return value if isinstance(value, bases) else _component(_Reward, bases, RewardFunction, reward_config(value))


def _part(value: Any) -> Nested:
    """Validate a `RewardPart`, `{id, args, weight, name}` or the id alone; the name defaults to the id."""
    part = _component(_Part, _REWARDS, RewardPart, part_config(value))
    return Nested({**part, "name": part.get("name") or name_of(part["id"])}, RewardPart)


def _component(block: type, bases: tuple[type, ...], kind: type, value: Any) -> Nested:
    """Validate the block of a reward of one of some classes; an id alone has no arguments."""
    # An id alone has no path of its own.
    path_of_id = "id"
    if isinstance(value, str):
        path_of_id = ""
        value = {"id": value}

    fields, issues = check_block(block, value, None)
    id = fields.get("id")
    if isinstance(id, str) and ("args" in fields or "args" not in value):
        try:
            target = REWARDS.signature(id)
            args = fields.get("args", {})
            if (misfit := _misfit(id, target, args, bases)) is not None:
                issues.append(ConfigIssue(path_of_id, misfit))
            fields["args"], args_issues = check_component(REWARDS, target, args, "args")
            issues += args_issues
        except ConfigError as error:
            issues += [ConfigIssue(path_of_id, issue.message) for issue in error.issues]
        except MissingExtraError:  # building the reward reports what to install
            pass

    if issues:
        raise RefusedError(*issues)
    return Nested({"id": fields["id"], "args": {}, **fields}, kind)


def _misfit(id: str, target: Any, args: Mapping[str, Any], bases: tuple[type, ...]) -> str | None:
    """Return the message for a reward that is not of the expected kind; None if it is, or if its kind is unknown."""
    kind: Any = REWARDS.resolve(id)
    if not inspect.isclass(kind) or not issubclass(kind, _REWARDS):
        return None
    if args.get(SHAPING) is not None and takes_shaping(REWARDS, target):
        kind = CombinedReward
    if issubclass(kind, bases):
        return None

    what = next(base.__name__ for base in _REWARDS if issubclass(kind, base))
    if issubclass(kind, CombinedReward):
        what = "combination of rewards, which scores single tokens"
    return f"expected a {' or '.join(base.__name__ for base in bases if base in _REWARDS)}; {id!r} is a {what}"


def _parts(value: Any) -> Any:
    """Validate a list of `RewardPart` with distinct names."""
    if value is None:
        raise RefusedError(ConfigIssue("", "expected a list of rewards, got null"))
    if isinstance(value, list | tuple):
        value = [part_config(item) for item in value]
    rewards, issues = check_value(value, list[Annotated[Any, PlainValidator(_part)]], "")

    # Also of a list with errors, so that all are reported at once.
    first_with_name: dict[str, int] = {}
    for index, item in enumerate(value if isinstance(value, list) else ()):
        part = item if isinstance(item, Mapping) else {"id": item}
        if not isinstance(part.get("id"), str):
            continue
        name = part.get("name") or name_of(part["id"])
        first = first_with_name.setdefault(str(name), index)
        if first != index:
            text = f"{name!r} is already the name of item {first}; give each item a distinct name"
            issues.append(ConfigIssue(f"{index}.name", text))
    if issues:
        raise RefusedError(*issues)
    return rewards


def _block(kind: type, value: Any) -> Any:
    """Validate a dataclass, given as a mapping of its fields."""
    if isinstance(value, kind):
        return value
    fields, issues = check_block(kind, {} if value is None else value, _validator_of)
    if issues:
        raise RefusedError(*issues)
    return Nested(fields, kind)


# --- defaults -------------------------------------------------------------------------------------------------------


def run_kind(mapping: Mapping[str, Any]) -> RunKind:
    """Return the kind of run of a config as plain data, by its `alg.id`."""
    id = at(mapping, "alg.id")
    if isinstance(id, str) and id in OBJECTIVES:
        return "preference"
    return "supervised" if id == "supervised" else "on_policy"


def _components(blocks: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Registry]]:
    """Yield path, block and registry of each component of a config as plain data."""
    kind = run_kind(blocks)
    registries = {"reward_fn": REWARDS, "datapool": DATA_POOLS}
    if kind == "on_policy":
        registries |= {"datapool.sampler": SAMPLERS, "alg": ALGORITHMS, "alg.policy": POLICIES}
        registries["alg.policy.args.engine"] = ENGINES
        registries["alg.ptx.data"] = DATA_POOLS
        registries["env.dialogue"] = ENVIRONMENTS
    else:
        registries[POST_PROCESSING] = POST_PROCESSORS
    if kind == "preference":
        registries["alg"] = OBJECTIVES

    # Looked up one by one: the engine is in the arguments of the policy, which have been replaced by then.
    for path, registry in registries.items():
        block = at(blocks, path)
        if isinstance(block, dict):
            yield path, block, registry
    for index, metric in enumerate(at(blocks, "train_evaluation.metrics") or ()):
        yield f"train_evaluation.metrics.{index}", metric, METRICS
    for index, callback in enumerate(at(blocks, "train_evaluation.callbacks") or ()):
        yield f"train_evaluation.callbacks.{index}", callback, CALLBACKS


def with_defaults(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a valid config as plain data with all arguments in the `args` of its components.

    The default of a size in tokens is left out where the size is given in episodes.
    """
    blocks = copy.deepcopy(dict(mapping))
    needs_critic = True
    for path, block, registry in _components(blocks):
        try:
            target = registry.arguments_class(block["id"])
        except ConfigError:  # of a config of another machine, whose code is not here
            target = None
        if target is None:  # without a signature the arguments stay as given
            continue

        # The algorithm comes first: its policy has no critic if no values are learned.
        args = block.get("args") or {}
        if path == "alg":
            needs_critic = getattr(target, "needs_critic", True)
        if path == "alg.policy" and not needs_critic:
            args = {"critic": "none", **args}
        checked, _ = check_component(registry, target, args, "")
        complete = _complete(target, changed(checked, _complete_nested), FILLED_IN.get(registry.kind, ()))
        block["args"] = _in_one_unit(target, complete, checked)

    if isinstance(blocks.get("env"), dict):
        blocks["env"]["args"] = _complete(EnvArguments, blocks["env"].get("args") or {})
    return blocks


def _in_one_unit(target: Any, args: dict[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return complete arguments without the default of a size in tokens where the size is given in episodes."""
    replaced = []
    for in_episodes, in_tokens in getattr(target, "IN_EPISODES", {}).items():
        if args.get(in_episodes) is not None and written.get(in_tokens) is None:
            replaced.append(in_tokens)
    return {name: value for name, value in args.items() if name not in replaced}


def _complete(target: Callable[..., Any], args: Mapping[str, Any], exclude: Sequence[str] = ()) -> dict[str, Any]:
    """Return all arguments in the order of the signature, then those accepted by `**kwargs`.

    Defaults that are objects are left out: a config cannot express them.
    """
    defaults = signature_of(target, exclude=exclude).defaults.items()
    everything = {name: value for name, value in defaults if _can_be_written(value)} | dict(args)

    in_order = [argument.name for argument in signature_of(target).arguments if argument.name in everything]
    return {name: everything[name] for name in dict.fromkeys([*in_order, *everything])}


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


# --- construction ---------------------------------------------------------------------------------------------------


def build_component(registry: Registry, config: ComponentConfig) -> Any:
    """Build a reward, metric or callback of a config.

    Raises:
        ComponentError: it could not be built; the message names it, and for an inner component its config path.
        MissingExtraError: it needs a package that is not installed.
        MissingResourceError: it needs another resource that is missing.
    """
    what = f"{registry.kind} {config.id!r}"
    checked, issues = check_component(registry, registry.signature(config.id), config.args, "args")
    if issues:
        raise ComponentError(f"{what} could not be built: {ConfigError(issues, 'its arguments')}")

    def build(nested: Nested, fields: dict[str, Any], path: str) -> Any:
        if nested.kind not in (RewardFunction, RewardPart):
            try:
                return nested.kind(**fields)
            except ValueError as error:
                raise ComponentError(f"args.{path} of the {what} could not be built: {error}") from error
        inner = f"{REWARDS.kind} {fields['id']!r} (args.{path} of the {what})"
        reward = _build_one(REWARDS, fields["id"], nested["args"], fields["args"], inner)
        options = {name: value for name, value in fields.items() if name in ("weight", "name")}
        return reward if nested.kind is RewardFunction else RewardPart(reward, **options)

    return _build_one(registry, config.id, checked, changed(checked, build), what)


def _build_one(registry: Registry, id: str, checked: Mapping[str, Any], args: dict[str, Any], what: str) -> Any:
    """Build a component from its arguments, in which inner components are built already."""
    shaping = args.pop(SHAPING, None) if takes_shaping(registry, registry.signature(id)) else None
    try:
        component = registry.get(id, args)
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ComponentError(f"{what} could not be built: {raised(error)}") from error

    # A class that has another role fails now, with its name, instead of in the first iteration.
    method = {"reward": "__call__", "metric": "compute", "callback": "on_iteration_end"}[registry.kind]
    if not callable(getattr(component, method, None)):
        text = f"it is a {type(component).__name__}, which has no method {method!r}"
        raise ComponentError(f"{what} is not a {registry.kind}: {text}")
    if shaping is None:
        return component

    # Names of the parts of the sum, by which its reward is logged.
    shaping_block = checked[SHAPING]
    shaping_name = type(shaping_block).__name__
    if isinstance(shaping_block, Nested):
        shaping_name = name_of(shaping_block["id"])
    return shaped(component, name_of(id), shaping, shaping_name)
