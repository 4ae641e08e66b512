"""Find the components of a config, check their `args` against their signatures, add defaults, and build them.

    reward_fn                  REWARDS
    datapool                   DATA_POOLS
    datapool.sampler           SAMPLERS, in RL runs
    train_evaluation.metrics   METRICS
    alg, alg.policy            ALGORITHMS, POLICIES
    alg.policy.args.engine     ENGINES
    alg                        OBJECTIVES, in preference runs
    post_processing_fn         POST_PROCESSORS, in supervised and preference runs

Arguments with the type of a reward are components too and are bound in the same way, at any depth. So is the
`shaping_fn` that every reward accepts.

    annotation                            config
    RewardFunction | None                 id, or {id, args}
    list[BatchedRewardFunction]           [id, {id, args}]
    dict[str, AnyReward]                  {name: {id, args}}
    list[RewardPart]                      [{id, args, weight, name}]
    a dataclass with such fields          {reward: {id, args}, ...}

A checked reward is a `Nested`: the mapping of the config, with the class of the object to build. Works on the raw
mapping, so an error in one place of a block does not prevent checks of the others. Loads no model and does not import
torch itself.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import PlainValidator

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.config.functions import part_config, reward_config
from rl4lms_like.core.kl_estimators import WITH_DISTRIBUTIONS
from rl4lms_like.data_pools import DATA_POOLS, SAMPLERS
from rl4lms_like.engines import ENGINES
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.metrics import METRICS
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import LoraArguments, bind_generation
from rl4lms_like.post_processors import POST_PROCESSORS
from rl4lms_like.rewards import REWARDS
from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction, RewardPart
from rl4lms_like.rewards.combine import CombinedReward, shaped
from rl4lms_like.system.errors import ComponentError, ConfigError, ConfigIssue, MissingExtraError, RL4LMsLikeError
from rl4lms_like.system.numbers import Finite
from rl4lms_like.system.registry import Registry
from rl4lms_like.system.schema import (
    ComponentOf,
    RefusedError,
    at,
    check_arguments,
    check_block,
    check_value,
    join,
    signature_of,
)
from rl4lms_like.system.wording import raised

if TYPE_CHECKING:
    from rl4lms_like.config.component import ComponentConfig

REGISTRIES: dict[str, Registry] = {
    "data_pools": DATA_POOLS,
    "samplers": SAMPLERS,
    "rewards": REWARDS,
    "metrics": METRICS,
    "post_processors": POST_PROCESSORS,
    "policies": POLICIES,
    "engines": ENGINES,
    "algorithms": ALGORITHMS,
    "objectives": OBJECTIVES,
}
"""Registries by their name on the command line."""

POST_PROCESSING = "alg.generation_kwargs.post_processing_fn"
"""Config path of the post-processor of a supervised or preference run's texts."""

ENGINE = "alg.policy.args.engine"
"""Config path of the generation engine."""

GENERATION = ("alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs", "alg.generation_kwargs")
"""Config paths of arguments for transformers' `generate`; the last is for supervised and preference runs."""

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


@dataclass(frozen=True)
class Slot:
    """Component in a config."""

    path: str  # config path
    block: dict[str, Any]  # its `id` and `args`
    registry: Registry  # of its kind

    def takes(self) -> Callable[..., Any]:
        """Return the class or function that receives the `args`: the target's `arguments_class` if it has one.

        Raises:
            ConfigError: the id is unknown, or its import path is invalid.
            MissingExtraError: the component's module needs a package that is not installed.
        """
        target = self.registry.signature(self.block["id"])
        return getattr(target, "arguments_class", target)

    @property
    def target(self) -> Any:
        """Result of `takes`; None without an id, or where it raises an error, which is reported elsewhere."""
        try:
            return self.takes() if isinstance(self.block.get("id"), str) else None
        except (ConfigError, MissingExtraError):
            return None


RunKind = Literal["on_policy", "supervised", "preference"]


def run_kind(blocks: Mapping[str, Any]) -> RunKind:
    """Return the kind of run of a raw mapping by its `alg.id`: `supervised`, an objective, or else on-policy."""
    id = at(blocks, "alg.id")
    if isinstance(id, str) and id in OBJECTIVES:
        return "preference"
    return "supervised" if id == "supervised" else "on_policy"


def slots(blocks: dict[str, Any]) -> Iterator[Slot]:
    """Yield the components of a raw mapping, except the environment, which is always `TextGenEnv`."""
    kind = run_kind(blocks)
    places = [("reward_fn", REWARDS), ("datapool", DATA_POOLS)]
    if kind == "on_policy":
        places += [("datapool.sampler", SAMPLERS), ("alg", ALGORITHMS), ("alg.policy", POLICIES), (ENGINE, ENGINES)]
    else:
        places.append((POST_PROCESSING, POST_PROCESSORS))
    if kind == "preference":
        places.append(("alg", OBJECTIVES))
    for path, registry in places:
        # looked up one by one: the engine is in the arguments of the policy, which may have been replaced by now
        if isinstance(block := at(blocks, path), dict):
            yield Slot(path, block, registry)
    metrics = at(blocks, "train_evaluation.metrics")
    for index, metric in enumerate(metrics if isinstance(metrics, list) else []):
        if isinstance(metric, dict):
            yield Slot(f"train_evaluation.metrics.{index}", metric, METRICS)


def targets(blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the target of each component's `args` by config path; components without a known target are left out."""
    return {slot.path: target for slot in slots(blocks) if (target := slot.target) is not None}


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
    also = (SHAPING,) if takes_shaping(registry, target) else ()
    own = {name: value for name, value in args.items() if name not in also}
    exclude = FILLED_IN.get(registry.kind, ())
    bound, issues = check_arguments(target, own, path, exclude=exclude, also=also, special=_validator_of)
    if also and args.get(SHAPING) is not None:
        try:
            bound[SHAPING] = _reward(_REWARDS, args[SHAPING])
        except RefusedError as refused:
            issues += [issue.below(join(path, SHAPING)) for issue in refused.issues]
    return bound, issues


def _validator_of(annotation: Any) -> Callable[[Any], Any] | None:
    """Return the function that validates a type of this module's table; None for any other type."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *rules = typing.get_args(annotation)
        named = {rule.name for rule in rules if isinstance(rule, ComponentOf)}
        if named:
            return partial(_reward, tuple(base for base in _REWARDS if base.__name__ in named))
        return _validator_of(annotation)
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    kinds = [option for option in options if option is not type(None)]
    if kinds and all(inspect.isclass(kind) and issubclass(kind, _REWARDS) for kind in kinds):
        return partial(_reward, options)
    if annotation is RewardPart:
        return _part
    if typing.get_origin(annotation) is list and _validator_of(typing.get_args(annotation)[0]) is _part:
        return _parts
    return partial(_block, annotation) if _is_block_of_rewards(annotation) else None


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
    is_id = isinstance(value, str)
    fields, issues = check_block(block, {"id": value} if is_id else value, None)
    if isinstance(id := fields.get("id"), str) and (is_id or "args" in fields or "args" not in value):
        try:
            target, args = REWARDS.signature(id), fields.get("args", {})
            if (misfit := _misfit(id, target, args, bases)) is not None:
                issues.append(ConfigIssue("id", misfit))
            fields["args"], wrong = check_component(REWARDS, target, args, "args")
            issues += wrong
        except ConfigError as error:
            issues += [ConfigIssue("id", issue.message) for issue in error.issues]
        except MissingExtraError:  # building the reward reports what to install
            pass
    if issues:
        raise RefusedError(*(ConfigIssue("", one.message) if is_id and one.path == "id" else one for one in issues))
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
    is_sum = issubclass(kind, CombinedReward)
    role = next(base.__name__ for base in _REWARDS if issubclass(kind, base))
    what = "combination of rewards, which scores single tokens" if is_sum else role
    return f"expected a {' or '.join(base.__name__ for base in bases if base in _REWARDS)}; {id!r} is a {what}"


def _parts(value: Any) -> Any:
    """Validate a list of `RewardPart` with distinct names."""
    if value is None:
        raise RefusedError(ConfigIssue("", "expected a list of rewards, got null"))
    if isinstance(value, list | tuple):
        value = [part_config(item) for item in value]
    parts, issues = check_value(value, list[Annotated[Any, PlainValidator(_part)]], "")
    taken: dict[str, int] = {}
    for index, item in enumerate(value if isinstance(value, list) else ()):
        given = item if isinstance(item, Mapping) else {"id": item}
        name = given.get("name") or name_of(str(given.get("id")))
        if isinstance(given.get("id"), str) and (first := taken.setdefault(str(name), index)) != index:
            text = f"{name!r} is already the name of item {first}; give each item a distinct name"
            issues.append(ConfigIssue(f"{index}.name", text))
    if issues:
        raise RefusedError(*issues)
    return parts


def _block(kind: type, value: Any) -> Any:
    """Validate a dataclass, given as a mapping of its fields."""
    if isinstance(value, kind):
        return value
    fields, issues = check_block(kind, {} if value is None else value, _validator_of)
    if issues:
        raise RefusedError(*issues)
    return Nested(fields, kind)


def bind(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return a copy of the mapping with all `args` coerced to their types, and every error in ids and `args`.

    Values without the form of a component are left to the check of the blocks.
    """
    blocks = copy.deepcopy(dict(mapping))
    issues = [issue for slot in slots(blocks) for issue in _bind(slot)]
    kl = at(blocks, "alg.kl_div")
    if isinstance(kl, dict):
        algorithm = targets(blocks).get("alg")
        if kl.get("placement") is None:
            default = getattr(algorithm, "kl_placement", "reward")
            is_in_loss = default == "advantage" and kl.get("estimator") in WITH_DISTRIBUTIONS
            kl["placement"] = "loss" if is_in_loss else default
        if kl.get("estimator") is None:
            kl["estimator"] = getattr(algorithm, "kl_estimator", "k3") if kl["placement"] == "loss" else "k1"
    env = blocks.get("env")
    if isinstance(env, dict) and isinstance(env.get("args"), Mapping | None):
        env["args"], wrong = check_arguments(EnvArguments, env.get("args") or {}, "env.args")
        issues += wrong
    for place in ("alg.policy.args", "alg"):
        block = at(blocks, place)
        if isinstance(block, dict) and isinstance(peft := block.get("peft"), Mapping):
            block["peft"] = {**peft, **check_arguments(LoraArguments, peft, place)[0]}
    for place in GENERATION:
        block = at(blocks, place.rpartition(".")[0])
        if isinstance(block, dict) and isinstance(kwargs := block.get("generation_kwargs"), Mapping):
            block["generation_kwargs"], wrong = bind_generation(kwargs, place)
            issues += wrong
    return blocks, issues


def _bind(slot: Slot) -> list[ConfigIssue]:
    args = slot.block.get("args")
    if not isinstance(slot.block.get("id"), str) or not isinstance(args, Mapping | None):
        return []
    try:
        target = slot.takes()
    except ConfigError as error:
        return [ConfigIssue(join(slot.path, "id"), issue.message) for issue in error.issues]
    except MissingExtraError:  # not an error in the config; building the component reports what to install
        return []
    bound, issues = check_component(slot.registry, target, args or {}, join(slot.path, "args"))
    slot.block["args"] = plain(bound)
    return issues


def with_defaults(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a bound mapping with all arguments in the `args` of every component, defaults included.

    The default of a size in tokens is left out where the size is given in episodes.
    """
    blocks = copy.deepcopy(dict(mapping))
    for slot in slots(blocks):
        if (target := slot.target) is None:  # without a signature the arguments stay as given
            continue
        if slot.path == "alg.policy" and not getattr(targets(blocks).get("alg"), "needs_critic", True):
            slot.block["args"] = {"critic": "none", **(slot.block.get("args") or {})}
        bound, _ = check_component(slot.registry, target, slot.block.get("args") or {}, "")
        exclude = FILLED_IN.get(slot.registry.kind, ())
        args = _complete(target, changed(bound, _complete_nested), exclude)
        for in_episodes, in_tokens in getattr(target, "IN_EPISODES", {}).items():
            if args.get(in_episodes) is not None and bound.get(in_tokens) is None:
                args.pop(in_tokens, None)
        slot.block["args"] = args
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


def build_component(registry: Registry, config: ComponentConfig) -> Any:
    """Build a reward or metric of a config.

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
    method = "__call__" if registry is REWARDS else "compute"
    if not callable(getattr(component, method, None)):
        text = f"it is a {type(component).__name__}, which has no method {method!r}"
        raise ComponentError(f"{what} is not a {registry.kind}: {text}")
    if shaping is None:
        return component
    given = checked[SHAPING]
    name = name_of(given["id"]) if isinstance(given, Nested) else type(given).__name__
    return shaped(component, name_of(id), shaping, name)
