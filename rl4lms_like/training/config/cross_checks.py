"""Check combinations of a config's keys, and names of local files. Loads no model and imports no torch.

Each check receives the whole raw mapping after `binding.bind`, and returns the mistakes that it finds. The metrics that
a config selects by key must be keys that `train_evaluation.metrics` reports:

    train_evaluation.keep_best: {metric: lexical/meteor, mode: max}      the model of the best evaluation
    alg.training_args.metric_for_best_model: eval_lexical/meteor         the same, in supervised runs
    doctor.held_out: [{metric: lexical/meteor, mode: max}]               must not fall while the reward rises
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms.arguments import (
    NLPOArguments,
    TRPOArguments,
    critic_issues,
    value_issues,
    without_second_derivatives,
)
from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ConfigIssue, DataPoolError
from rl4lms_like.core.model_weights import names_folder
from rl4lms_like.core.schema import at, join, signature_of, unknown_key
from rl4lms_like.core.secrets import names_variable
from rl4lms_like.core.wording import shown
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import named_key
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import MaskablePolicyArguments, lora_issues, mask_issues
from rl4lms_like.training.config.places import GENERATION, POST_PROCESSING, targets
from rl4lms_like.training.small_models.embedded import NAMES, is_embedded, unknown_embedded_model

PLACE, HELD_OUT = "train_evaluation.keep_best", "doctor.held_out"
SUPERVISED = "alg.training_args.metric_for_best_model"
"""Config path of the metric in supervised runs: `loss` or a key of the metrics, with an optional prefix `eval_`."""


def cross_check(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Return the mistakes that all checks find in a bound mapping."""
    return [issue for check in CROSS_CHECKS for issue in check(blocks)]


def _embedded_models(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Find names with the prefix of embedded models that no embedded model has."""
    return [
        ConfigIssue(path, unknown_embedded_model(value))
        for path, value in _values(blocks)
        if is_embedded(value) and value not in NAMES
    ]


def _values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf of nested mappings and lists."""
    if not isinstance(value, Mapping | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _values(item, join(path, key))


def _missing_folders(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Find model names that can only be local folders, and do not exist."""
    places = ["tokenizer.model_name", "alg.model_name"]
    places += [f"alg.policy.args.{key}" for key in ("model_name", "reference_model", "critic_model")]
    names = ((path, at(blocks, path)) for path in places)
    return [
        ConfigIssue(path, f"there is no folder {name!r}" + _where_from(name))
        for path, name in names
        if isinstance(name, str) and not is_embedded(name) and names_folder(name) and not with_home(name).is_dir()
    ]


def _missing_data(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check that the `data_dir` of the library's own pools exists."""
    module = str(getattr(targets(blocks).get("datapool"), "__module__", ""))
    folder = at(blocks, "datapool.args.data_dir")
    if not module.startswith("rl4lms_like.data_pools.") or not isinstance(folder, str) or names_variable(folder):
        return []
    if with_home(folder).is_dir():
        return []
    return [ConfigIssue("datapool.args.data_dir", f"there is no folder {folder!r}" + _where_from(folder))]


def _where_from(name: str) -> str:
    return "" if with_home(name).is_absolute() else f" below {Path.cwd()}"


def _pool_files(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check that the library's own pools get either one file for all splits or one for each."""
    args = at(blocks, "datapool.args")
    if file_pool(blocks) is None or (args.get("path") is None) != (args.get("data_files") is None):
        return []
    return [
        ConfigIssue("datapool.args", "give either path (one file for all splits) or data_files (one file per split)")
    ]


def file_pool(blocks: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the function that prepares the run's data pool, if it is one of the library's that read a user's file."""
    prepare = targets(blocks).get("datapool")
    if prepare is None or not str(prepare.__module__).startswith("rl4lms_like.data_pools."):
        return None
    optional = signature_of(prepare).defaults  # excludes `hf_dataset`, whose `path` is required and not a file
    reads_files = {"path", "data_files"} <= optional.keys() and isinstance(at(blocks, "datapool.args"), Mapping)
    return prepare if reads_files else None


def data_issues(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Find missing files of the library's own pools, and files whose first row lacks a column that the config names.

    Args:
        blocks: a bound mapping without mistakes in `datapool`.
    """
    prepare, args = file_pool(blocks), at(blocks, "datapool.args")
    if prepare is None or any(map(names_variable, [*args.values(), *(args.get("data_files") or {}).values()])):
        return []  # environment variables are read when the pool is prepared
    path, files = args.get("path"), args.get("data_files") or {}
    found = []
    for split in ("train",) if path is not None else SPLITS:
        place, file = ("path", path) if path is not None else (f"data_files.{split}", files.get(split))
        if isinstance(file, str) and not os.path.exists(with_home(file)):
            found.append(ConfigIssue(f"datapool.args.{place}", f"there is no file {file!r}" + _where_from(file)))
            continue
        own = files if path is None else {split: path}
        try:
            prepare(split, **{**args, "path": None, "data_files": own, "max_size": 1})
        except DataPoolError as error:
            found.append(ConfigIssue("datapool.args", str(error)))
    return found


def _post_processing(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check that `post_processing_fn` is null or a component in supervised runs, and not set in RL runs."""
    post = at(blocks, POST_PROCESSING)
    found = []
    if post is not None and not (isinstance(post, Mapping) and isinstance(post.get("id"), str)):
        found = [ConfigIssue(POST_PROCESSING, f"expected null or a mapping with id; got {shown(post)}")]
    elif post is not None:
        others = [key for key in post if key not in ("id", "args")]
        found = [ConfigIssue(join(POST_PROCESSING, key), unknown_key(key, ("id", "args"))) for key in others]
    for place in ("alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs"):
        if at(blocks, f"{place}.post_processing_fn") is not None:
            text = "is only for supervised runs; the responses of an RL run are scored unchanged"
            found.append(ConfigIssue(f"{place}.post_processing_fn", text))
    return found


def _response_lengths(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check that `max_length` of a seq2seq model is above 1: it counts the start token."""
    return [
        ConfigIssue(f"{place}.max_length", "counts a seq2seq model's start token: expected at least 2")
        for place in GENERATION
        if at(blocks, f"{place}.max_length") == 1 and at(blocks, f"{place}.max_new_tokens") is None
        if at(blocks, "alg.model_type") == "seq2seq" or "seq2seq" in str(at(blocks, "alg.policy.id"))
    ]


def _metric_keys(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Find metrics that report the same key, which would overwrite each other. Identical metrics are computed once."""
    metrics = at(blocks, "train_evaluation.metrics")
    issues: list[ConfigIssue] = []
    owners: dict[str, int] = {}
    for index, metric in enumerate(metrics if isinstance(metrics, list) else []):
        for key in () if metric in metrics[:index] else _keys_of(metric):
            if "{" not in key and owners.setdefault(key, index) != index:
                other = f"train_evaluation.metrics.{owners[key]} ({metrics[owners[key]]['id']})"
                text = f"reports {key!r}, as {other} does; give one of them a name, which is appended to its keys"
                issues.append(ConfigIssue(f"train_evaluation.metrics.{index}", text))
                break
    return issues


def _keys_of(metric: Any) -> list[str]:
    """Return the keys that a metric of the table reports; `{n}` is a part that depends on its arguments."""
    id = metric.get("id") if isinstance(metric, Mapping) else None
    if not isinstance(id, str) or id not in METRICS:
        return []
    name = metric.get("name")
    return [named_key(key, name) if name else key for key in METRICS.entry(id).keys]


def _optimizer_arguments(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Find optimizer arguments that the config sets by a separate key."""
    own = {"weight_decay": "alg.policy.args.weight_decay", "lr": "alg.args.learning_rate"}
    given = at(blocks, "alg.policy.args.optimizer_kwargs")
    return [
        ConfigIssue(f"alg.policy.args.optimizer_kwargs.{key}", f"is set by {instead}")
        for key, instead in own.items()
        if isinstance(given, Mapping) and key in given
    ]


def _adapters(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check the fields of `peft`, and that `merge_on_save` is only used with it."""
    issues = []
    for place in ("alg.policy.args", "alg"):
        issues += lora_issues(at(blocks, f"{place}.peft"), f"{place}.peft")
        if at(blocks, f"{place}.merge_on_save") is True and at(blocks, f"{place}.peft") is None:
            issues.append(ConfigIssue(f"{place}.merge_on_save", "there are no adapters to merge without peft"))
    return issues


def _hub_kernels(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check that attention kernels of the hub, `owner/name`, are trusted: their code is downloaded and run."""
    args = "alg.policy.args"
    name = at(blocks, f"{args}.attn_implementation")
    if not isinstance(name, str) or "/" not in name or at(blocks, f"{args}.trust_remote_code") is True:
        return []
    text = f"{name!r} would run code from the hub; if you trust it, set {args}.trust_remote_code: true"
    return [ConfigIssue(f"{args}.attn_implementation", text)]


def _whole_episodes(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Find keys that need `vec_env: text`, which generates whole episodes; other kinds call the reward in `step`."""
    kind = at(blocks, "env.vec_env")
    if kind not in ("dummy", "subproc"):
        return []
    text = f"requires vec_env 'text', got {kind!r}, which calls the reward in each step"
    return [ConfigIssue(f"env.{key}", text) for key in ("reward_workers", "reward_timeout") if at(blocks, f"env.{key}")]


def _critic(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check the critic: a shared one has no separate network, an algorithm without values has no critic."""
    args = "alg.policy.args"
    given, takes = at(blocks, args), targets(blocks)
    if isinstance(given, Mapping) and "alg" in takes:
        id, own = blocks["alg"]["id"], blocks["alg"].get("args") or {}
        found = [issue.below(args) for issue in critic_issues(takes["alg"], given, id)]
        found += [issue.below("alg.args") for issue in value_issues(takes["alg"], own, id)]
        if found:
            return found
    if at(blocks, f"{args}.critic") != "shared" or at(blocks, f"{args}.critic_model") is None:
        return []
    return [
        ConfigIssue(
            f"{args}.critic_model", "is the network of a separate critic; set critic to 'separate', or remove it"
        )
    ]


def _masks(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check that `nlpo` is used with a maskable policy and vice versa, and that rollouts can record the masks."""
    alg = blocks.get("alg")
    takes = targets(blocks)
    if not isinstance(alg, dict) or not {"alg", "alg.policy"} <= takes.keys():
        return []
    masks, maskable = _is_kind(takes["alg"], NLPOArguments), _is_kind(takes["alg.policy"], MaskablePolicyArguments)
    id, policy = alg["id"], alg["policy"]["id"]
    if masks and not maskable:
        other = f"maskable_{policy}" if f"maskable_{policy}" in POLICIES else "a maskable policy"
        return [ConfigIssue("alg.policy.id", f"{id} needs a policy with a mask model: {other}, not {policy}")]
    if maskable and not masks:
        plain = policy.removeprefix("maskable_")
        hint = f"; use {plain} with {id}" if plain != policy else ""
        return [ConfigIssue("alg.policy.id", f"{policy} needs alg.id: nlpo, which refreshes its mask model{hint}")]
    args = alg["policy"].get("args")
    return mask_issues(args, "alg.policy.args") if maskable and isinstance(args, Mapping) else []


def _second_derivatives(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Check that the networks of `trpo` can be differentiated twice."""
    args = at(blocks, "alg.policy.args")
    if not _is_kind(targets(blocks).get("alg"), TRPOArguments) or not isinstance(args, Mapping):
        return []
    found = without_second_derivatives(args)
    return [ConfigIssue(join("alg.policy.args", issue.path), issue.message) for issue in found]


def _is_kind(target: Any, kind: type) -> bool:
    """Return whether the target of a component's `args` is a class of this kind."""
    return isinstance(target, type) and issubclass(target, kind)


def chosen_metric_issues(blocks: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return a mistake for each selected key that no metric of the config reports, if all reported keys are known."""
    known = _reported(at(blocks, "train_evaluation.metrics"))
    if known is None:
        return []
    held_out = at(blocks, HELD_OUT)
    chosen = {f"{PLACE}.metric": at(blocks, f"{PLACE}.metric")}
    for index, each in enumerate(held_out if isinstance(held_out, list) else []):
        chosen[f"{HELD_OUT}.{index}.metric"] = each.get("metric") if isinstance(each, Mapping) else None
    issues = [
        unknown_metric(path, wanted, known)
        for path, wanted in chosen.items()
        if isinstance(wanted, str) and not _is_among(wanted, known)
    ]
    best = at(blocks, SUPERVISED)
    if isinstance(best, str) and not _is_among(best.removeprefix("eval_"), ["loss", *known]):
        issues.append(unknown_metric(SUPERVISED, best, ["loss", *known]))
    return issues


def unknown_metric(path: str, wanted: str, known: Iterable[str]) -> ConfigIssue:
    """Return the mistake for a key at a config path that no metric reports, with the closest known key."""
    keys = list(known)
    near = difflib.get_close_matches(wanted, keys, n=1)
    listed = ", ".join(keys) or "none, because train_evaluation.metrics is empty"
    hint = f"did you mean {near[0]!r}?" if near else f"known: {listed}"
    return ConfigIssue(path, f"no metric reports {wanted!r}; {hint}")


def _reported(metrics: Any) -> list[str] | None:
    """Return the keys of the config's metrics; None with a user's metric, whose keys are unknown before evaluation."""
    keys: list[str] = []
    for metric in metrics if isinstance(metrics, list) else []:
        own = _keys_of(metric)
        if not own:
            return None
        keys += own
    return keys


def _is_among(wanted: str, keys: Iterable[str]) -> bool:
    """Return whether a key is among the keys of the table, where `{n}` is a part that depends on arguments."""
    return any(re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(key)), wanted) for key in keys)


CROSS_CHECKS = (
    _embedded_models,
    _missing_folders,
    _missing_data,
    _pool_files,
    _post_processing,
    _response_lengths,
    _metric_keys,
    chosen_metric_issues,
    _optimizer_arguments,
    _adapters,
    _hub_kernels,
    _whole_episodes,
    _critic,
    _masks,
    _second_derivatives,
)
"""Checks of a bound mapping, in the order in which they run."""
