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
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.arguments import NLPOArguments, TRPOArguments, without_second_derivatives
from rl4lms_like.core.errors import ConfigError, MissingExtraError, Mistake
from rl4lms_like.core.registry import Registry
from rl4lms_like.core.schema import check_arguments, join, signature_of
from rl4lms_like.core.wording import shown
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.metrics import METRICS
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import MaskablePolicyArguments, mask_mistakes
from rl4lms_like.policies.lora_arguments import lora_mistakes
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
    """A copy of the mapping with all `args` coerced to their types, and every mistake in ids, `args` and paths.

    What is not shaped like a component at all is left to the check of the blocks.
    """
    blocks = copy.deepcopy(dict(mapping))
    mistakes = []
    for slot in _slots(blocks):
        mistakes += _bind(slot)
    mistakes += _bind_env(blocks)
    for check in CROSS_CHECKS:
        mistakes += check(blocks)
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


def at(blocks: Any, path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    for key in path.split("."):
        blocks = blocks.get(key) if isinstance(blocks, Mapping) else None
    return blocks


def _missing_folders(blocks: dict[str, Any]) -> list[Mistake]:
    """Model names that can only be local folders, and are not there."""
    places = ["tokenizer.model_name", "alg.model_name"]
    places += [f"alg.policy.args.{key}" for key in ("model_name", "reference_model", "critic_model")]
    names = ((path, at(blocks, path)) for path in places)
    return [
        Mistake(path, f"there is no folder {name!r}" + _where_from(name))
        for path, name in names
        if isinstance(name, str) and names_folder(name) and not Path(name).expanduser().is_dir()
    ]


def names_folder(name: str) -> bool:
    """Whether a model name means a local folder: hub ids are `name` or `owner/name`.

    `owner/name` means a folder only where a folder `owner` stands.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        return True
    return "/" in name and Path(name).parent.is_dir()


def _where_from(name: str) -> str:
    return "" if Path(name).expanduser().is_absolute() else f" below {Path.cwd()}"


def _shaping_rewards(blocks: dict[str, Any]) -> list[Mistake]:
    """A reward's `shaping_fn` is the id of another reward."""
    id = at(blocks, "reward_fn.args.shaping_fn")
    if not isinstance(id, str):
        return []
    try:
        REWARDS.entry(id)
    except ConfigError as error:
        return [Mistake("reward_fn.args.shaping_fn", mistake.message) for mistake in error.mistakes]
    return []


def _post_processing(blocks: dict[str, Any]) -> list[Mistake]:
    """A supervised run's `post_processing_fn` is null: there are no post-processing functions to name."""
    path = "alg.generation_kwargs.post_processing_fn"
    post = at(blocks, path)
    if post is None:
        return []
    if isinstance(post, Mapping) and isinstance(post.get("id"), str):
        return [Mistake(f"{path}.id", f"unknown id {post['id']!r}; no post-processing function is known, write null")]
    return [Mistake(path, f"expected null or a mapping with id; got {shown(post)}")]


def _optimizer_arguments(blocks: dict[str, Any]) -> list[Mistake]:
    """Arguments of the optimizer that have a key of their own."""
    own = {"weight_decay": "alg.policy.args.weight_decay", "lr": "alg.args.learning_rate"}
    given = at(blocks, "alg.policy.args.optimizer_kwargs")
    return [
        Mistake(f"alg.policy.args.optimizer_kwargs.{key}", f"is set by {instead}")
        for key, instead in own.items()
        if isinstance(given, Mapping) and key in given
    ]


def _adapters(blocks: dict[str, Any]) -> list[Mistake]:
    """The fields of `peft`, and what has a meaning beside it only."""
    mistakes = []
    for place in ("alg.policy.args", "alg"):
        mistakes += lora_mistakes(at(blocks, f"{place}.peft"), f"{place}.peft")
        if at(blocks, f"{place}.merge_on_save") is True and at(blocks, f"{place}.peft") is None:
            mistakes.append(Mistake(f"{place}.merge_on_save", "there are no adapters to merge without peft"))
    return mistakes


def _critic(blocks: dict[str, Any]) -> list[Mistake]:
    """A shared critic has no network of its own."""
    args = "alg.policy.args"
    if at(blocks, f"{args}.critic") != "shared" or at(blocks, f"{args}.critic_model") is None:
        return []
    return [
        Mistake(f"{args}.critic_model", "is the network of a separate critic; set critic to 'separate', or drop it")
    ]


def _masks(blocks: dict[str, Any]) -> list[Mistake]:
    """`nlpo` and the maskable policies need each other, and rollouts whose masks can be recorded."""
    alg = blocks.get("alg")
    takes = {slot.path: _known(slot) for slot in _slots(blocks)}
    if not isinstance(alg, dict) or takes.get("alg") is None or takes.get("alg.policy") is None:
        return []
    masks, maskable = is_kind(takes["alg"], NLPOArguments), is_kind(takes["alg.policy"], MaskablePolicyArguments)
    id, policy = alg["id"], alg["policy"]["id"]
    if masks and not maskable:
        other = f"maskable_{policy}" if f"maskable_{policy}" in POLICIES else "a maskable policy"
        return [Mistake("alg.policy.id", f"{id} needs a policy with a mask model: {other}, not {policy}")]
    if maskable and not masks:
        plain = policy.removeprefix("maskable_")
        hint = f"; {id} takes {plain}" if plain != policy else ""
        return [Mistake("alg.policy.id", f"{policy} needs alg.id: nlpo, which refreshes its mask model{hint}")]
    return mask_mistakes(alg["policy"].get("args") or {}, "alg.policy.args") if maskable else []


def _second_derivatives(blocks: dict[str, Any]) -> list[Mistake]:
    """`trpo` needs networks that can be differentiated twice."""
    takes = {slot.path: _known(slot) for slot in _slots(blocks)}
    args = at(blocks, "alg.policy.args")
    if not is_kind(takes.get("alg"), TRPOArguments) or not isinstance(args, Mapping):
        return []
    found = without_second_derivatives(args)
    return [Mistake(join("alg.policy.args", mistake.path), mistake.message) for mistake in found]


def _known(slot: _Slot) -> Callable[..., Any] | None:
    """What a component's `args` go to; None where that cannot be said, which is reported elsewhere."""
    if not isinstance(slot.block.get("id"), str):
        return None
    try:
        return _takes(slot)
    except (ConfigError, MissingExtraError):
        return None


def is_kind(target: Any, kind: type) -> bool:
    """Whether what a component's `args` go to is a class of this kind."""
    return isinstance(target, type) and issubclass(target, kind)


CROSS_CHECKS = (
    _missing_folders,
    _shaping_rewards,
    _post_processing,
    _optimizer_arguments,
    _adapters,
    _critic,
    _masks,
    _second_derivatives,
)
"""What several keys say together."""
