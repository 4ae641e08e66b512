"""Check combinations of a config's keys, and names of local files. Loads no model and imports no torch.

Each check receives the whole raw mapping after `binding.bind`, and returns the errors that it finds. The metrics that
a config selects by key must be keys that `train_evaluation.metrics` reports:

    train_evaluation.keep_best: {metric: lexical/meteor, mode: max}      the model of the best evaluation
    train_evaluation.early_stopping: {metric: lexical/meteor ...}        the end of the training
    alg.training_args.metric_for_best_model: eval_lexical/meteor         the same, in supervised runs
    doctor.held_out: [{metric: lexical/meteor, mode: max}]               must not fall while the reward rises

The message for an unknown key of TRL, OpenRLHF or verl names the equivalent key of this library's RL configs:

    cliprange: 0.1      unknown key; the equivalent is alg.args.clip_range (docs/coming_from_trl.md)
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms.arguments import (
    CorrectedArguments,
    NLPOArguments,
    TRPOArguments,
    combination_issues,
    critic_issues,
    kl_issues,
    teacher_issues,
    value_issues,
    without_second_derivatives,
)
from rl4lms_like.config.binding import GENERATION, POST_PROCESSING, run_kind, targets
from rl4lms_like.core.model_weights import names_folder
from rl4lms_like.data_pools.splits import SPLITS
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import named_key
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import (
    OWN_ENGINE,
    MaskablePolicyArguments,
    device_role_issues,
    engine_issues,
    lora_issues,
    mask_issues,
    unsupported_generation,
)
from rl4lms_like.small_models.embedded import NAMES, TINY_MODEL, is_embedded, unknown_embedded_model
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigIssue, DataPoolError
from rl4lms_like.system.ranks import n_processes
from rl4lms_like.system.schema import UNKNOWN_KEY, at, join, signature_of, unknown_key
from rl4lms_like.system.secrets import names_variable
from rl4lms_like.system.wording import shown

PLACE, HELD_OUT, POLICY = "train_evaluation.keep_best", "doctor.held_out", "alg.policy.args"
EARLY_STOPPING = "train_evaluation.early_stopping"
EVALUATION = "train_evaluation.generation_kwargs"
RUN_REWARD = "reward"
"""Id of the metric that is the run's own reward."""
SUPERVISED = "alg.training_args.metric_for_best_model"
"""Config path of the metric in supervised runs: `loss` or a key of the metrics, with an optional prefix `eval_`."""


def cross_check(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Return the errors that all checks find in a bound mapping."""
    return [issue for check in CROSS_CHECKS for issue in check(blocks)]


def _embedded_models(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find names with the prefix of embedded models that no embedded model has, and a `tiny_model` without use."""
    named = {path: value for path, value in _values(blocks) if is_embedded(value)}
    described = blocks.get("tiny_model") is not None
    for path, value in named.items():
        if value not in NAMES and not (described and value == TINY_MODEL):
            yield ConfigIssue(path, unknown_embedded_model(value))
    if described and TINY_MODEL not in named.values():
        yield ConfigIssue("tiny_model", f"has no effect: no model of this config is {TINY_MODEL!r}")


def _values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every leaf of nested mappings and lists."""
    if not isinstance(value, Mapping | list):
        yield path, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _values(item, join(path, key))


def _missing_folders(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find missing folders: model names that can only be local, and the `data_dir` of the library's own pools."""
    policy = (f"{POLICY}.{key}" for key in ("model_name", "reference_model", "critic_model", "teacher_model"))
    models = ("tokenizer.model_name", "alg.model_name", "alg.args.reference_model", *policy)
    folders = {path: at(blocks, path) for path in ("datapool.args.data_dir", *models)}
    for path, name in folders.items():
        if not isinstance(name, str) or with_home(name).is_dir():
            continue
        if path in models:
            is_local = names_folder(name) and not is_embedded(name)
        else:
            is_local = _own_pool(blocks) is not None and not names_variable(name)
        if is_local:
            yield ConfigIssue(path, f"there is no folder {name!r}" + _where_from(name))


def _where_from(name: str) -> str:
    return "" if with_home(name).is_absolute() else f" below {Path.cwd()}"


def _pool_files(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that the library's own pools get either one file for all splits or one for each."""
    args = at(blocks, "datapool.args")
    if _file_pool(blocks) is not None and (args.get("path") is None) == (args.get("data_files") is None):
        text = "give either path (one file for all splits) or data_files (one file per split)"
        yield ConfigIssue("datapool.args", text)


def _own_pool(blocks: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the function that prepares the run's data pool, if the pool is one of the library's."""
    prepare: Callable[..., Any] | None = targets(blocks).get("datapool")
    return prepare if str(getattr(prepare, "__module__", "")).startswith("rl4lms_like.data_pools.") else None


def _file_pool(blocks: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the function that prepares the run's data pool, if it is one of the library's that read a user's file."""
    prepare, args = _own_pool(blocks), at(blocks, "datapool.args")
    if prepare is None or not isinstance(args, Mapping) or args.get("dataset") is not None:
        return None
    # `hf_dataset` is excluded: its `path` is required and not a file
    return prepare if {"path", "data_files"} <= signature_of(prepare).defaults.keys() else None


def data_issues(blocks: dict[str, Any]) -> list[ConfigIssue]:
    """Find missing files of the library's own pools, and files whose first row lacks a column that the config names.

    The mapping is bound, without errors in `datapool`.
    """
    prepare, args = _file_pool(blocks), at(blocks, "datapool.args")
    if prepare is None or any(map(names_variable, [*args.values(), *(args.get("data_files") or {}).values()])):
        return []  # environment variables are read when the pool is prepared
    path, found = args.get("path"), []
    files = args.get("data_files") or {} if path is None else {"train": path}
    for split in ("train",) if path is not None else SPLITS:
        place, file = "path" if path is not None else f"data_files.{split}", files.get(split)
        if isinstance(file, str) and not os.path.exists(with_home(file)):
            found.append(ConfigIssue(f"datapool.args.{place}", f"there is no file {file!r}" + _where_from(file)))
            continue
        try:
            prepare(split, **{**args, "path": None, "data_files": files, "max_size": 1})
        except DataPoolError as error:
            found.append(ConfigIssue("datapool.args", str(error)))
    return found


def _samplers(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that a sampler is in an RL run, and gets the rewards of all episodes."""
    if at(blocks, "datapool.sampler") is None:
        return
    if (kind := at(blocks, "env.vec_env")) not in (None, "text"):
        text = f"{kind!r} has one sampler per environment, which gets no rewards; set it to text"
        yield ConfigIssue("env.vec_env", text)
    if at(blocks, "env.args.priority_scale"):
        yield ConfigIssue("env.args.priority_scale", "has no effect with datapool.sampler; remove one of them")


def _chat_template(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that the file of a chat template exists, and find keys that depend on there being one, or none."""
    template, separator = at(blocks, "tokenizer.chat_template"), at(blocks, "alg.separator")
    if isinstance(template, str) and not os.path.isfile(with_home(template)):
        text = f"there is no file {template!r}{_where_from(template)}; true uses the template of the tokenizer"
        yield ConfigIssue("tokenizer.chat_template", text)
    for key in ("tokenizer.system_prompt", "tokenizer.template_date"):
        if not template and at(blocks, key) is not None:
            yield ConfigIssue(key, "has no effect without tokenizer.chat_template")
    if template and separator is not None:
        yield ConfigIssue("alg.separator", "has no effect with tokenizer.chat_template, which separates messages")


def _post_processing(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that `post_processing_fn` is null or a component in supervised runs, and not set in RL runs."""
    post = at(blocks, POST_PROCESSING)
    if post is not None and not (isinstance(post, Mapping) and isinstance(post.get("id"), str)):
        yield ConfigIssue(POST_PROCESSING, f"expected null or a mapping with id; got {shown(post)}")
    elif post is not None:
        for key in [key for key in post if key not in ("id", "args")]:
            yield ConfigIssue(join(POST_PROCESSING, key), unknown_key(key, ("id", "args")))
    for place in (f"{POLICY}.generation_kwargs", "train_evaluation.generation_kwargs"):
        if at(blocks, f"{place}.post_processing_fn") is not None:
            text = "is only for supervised runs; the responses of an RL run are scored unchanged"
            yield ConfigIssue(f"{place}.post_processing_fn", text)


def _response_lengths(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that `max_length` of a seq2seq model is above 1: it counts the start token."""
    if at(blocks, "alg.model_type") != "seq2seq" and "seq2seq" not in str(at(blocks, "alg.policy.id")):
        return
    for place in GENERATION:
        if at(blocks, f"{place}.max_length") == 1 and at(blocks, f"{place}.max_new_tokens") is None:
            yield ConfigIssue(f"{place}.max_length", "counts a seq2seq model's start token: expected at least 2")


def _metric_keys(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find metrics that report the same key, which would overwrite each other. Identical metrics are computed once."""
    metrics = at(blocks, "train_evaluation.metrics")
    owners: dict[str, int] = {}
    for index, metric in enumerate(metrics if isinstance(metrics, list) else []):
        for key in () if metric in metrics[:index] else _keys_of(metric):
            if "{" not in key and owners.setdefault(key, index) != index:
                other = f"train_evaluation.metrics.{owners[key]} ({metrics[owners[key]]['id']})"
                text = f"reports {key!r}, as {other} does; give one of them a name, which is appended to its keys"
                yield ConfigIssue(f"train_evaluation.metrics.{index}", text)
                break


def _reward_as_metric(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find the metric that is the run's own reward in a run without one."""
    metrics = at(blocks, "train_evaluation.metrics")
    for index, metric in enumerate(metrics if isinstance(metrics, list) else []):
        if at(metric, "id") == RUN_REWARD and run_kind(blocks) != "on_policy":
            message = "is the reward of an RL run, and this run has none; metrics such as reward_model need no reward"
            yield ConfigIssue(f"train_evaluation.metrics.{index}", message)


def _keys_of(metric: Any) -> list[str]:
    """Return the keys that a metric of the table reports; `{n}` is a part that depends on its arguments."""
    id, name = at(metric, "id"), at(metric, "name")
    if not isinstance(id, str) or id not in METRICS:
        return []
    return [named_key(key, name) if name else key for key in METRICS.entry(id).keys]


def _optimizer_arguments(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find optimizer arguments that the config sets by a separate key."""
    given = at(blocks, f"{POLICY}.optimizer_kwargs")
    for key, instead in (("weight_decay", f"{POLICY}.weight_decay"), ("lr", "alg.args.learning_rate")):
        if isinstance(given, Mapping) and key in given:
            yield ConfigIssue(f"{POLICY}.optimizer_kwargs.{key}", f"is set by {instead}")


def _adapters(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check the fields of `peft`, and that `merge_on_save` is only used with it."""
    for place in (POLICY, "alg"):
        yield from lora_issues(at(blocks, f"{place}.peft"), f"{place}.peft")
        if at(blocks, f"{place}.merge_on_save") is True and at(blocks, f"{place}.peft") is None:
            yield ConfigIssue(f"{place}.merge_on_save", "there are no adapters to merge without peft")


def _hub_kernels(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that attention kernels of the hub, `owner/name`, are trusted: their code is downloaded and run."""
    name = at(blocks, f"{POLICY}.attn_implementation")
    if isinstance(name, str) and "/" in name and at(blocks, f"{POLICY}.trust_remote_code") is not True:
        text = f"{name!r} would run code from the hub; if you trust it, set {POLICY}.trust_remote_code: true"
        yield ConfigIssue(f"{POLICY}.attn_implementation", text)


def _whole_episodes(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find keys that need `vec_env: text`, which generates whole episodes; other kinds call the reward in `step`."""
    kind = at(blocks, "env.vec_env")
    for key in ("reward_workers", "reward_timeout") if kind in ("dummy", "subproc") else ():
        if at(blocks, f"env.{key}"):
            text = f"requires vec_env 'text', got {kind!r}, which calls the reward in each step"
            yield ConfigIssue(f"env.{key}", text)


def _critic(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check the critic: a shared one has no separate network, an algorithm without values has no critic."""
    given, algorithm, kl = at(blocks, POLICY), targets(blocks).get("alg"), at(blocks, "alg.kl_div")
    found = []
    if isinstance(given, Mapping) and algorithm is not None:
        id, own = blocks["alg"]["id"], blocks["alg"].get("args") or {}
        for path, issues in (
            (POLICY, critic_issues(algorithm, given, id) + teacher_issues(algorithm, given, id)),
            ("alg.args", value_issues(algorithm, own, id) + combination_issues(algorithm, own, given)),
            ("alg.kl_div", kl_issues(algorithm, own, kl, id) if kl else []),
        ):
            found += [issue.below(path) for issue in issues]
    yield from found
    if not found and at(blocks, f"{POLICY}.critic") == "shared" and at(blocks, f"{POLICY}.critic_model") is not None:
        text = "is the network of a separate critic; set critic to 'separate', or remove it"
        yield ConfigIssue(f"{POLICY}.critic_model", text)


def _groups(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that several responses to a prompt are generated together."""
    default = getattr(targets(blocks).get("alg"), "group_size", 1)
    size, n_envs = at(blocks, "alg.args.group_size") or default, at(blocks, "env.n_envs") or 1
    if not isinstance(size, int) or not isinstance(n_envs, int) or size <= 1:
        return
    if n_envs % size:
        text = f"must be a multiple of alg.args.group_size, {size}: {n_envs} responses are generated together"
        yield ConfigIssue("env.n_envs", text)
    if at(blocks, "env.vec_env") in ("dummy", "subproc"):
        yield ConfigIssue("env.vec_env", "must be text if alg.args.group_size is above 1")


def _rollouts_in_episodes(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that generation batches of `n_envs` episodes fill a rollout exactly."""
    n_episodes = at(blocks, "alg.args.n_episodes")
    n_envs = at(blocks, "env.n_envs") or 1
    if isinstance(n_episodes, int) and isinstance(n_envs, int) and n_episodes % n_envs:
        text = f"must be a multiple of env.n_envs, {n_envs} episodes that are generated together; got {n_episodes}"
        yield ConfigIssue("alg.args.n_episodes", text)


def _masks(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that `nlpo` is used with a maskable policy and vice versa, and that rollouts can record the masks."""
    takes = targets(blocks)
    if not {"alg", "alg.policy"} <= takes.keys():
        return
    masks, maskable = _is_kind(takes["alg"], NLPOArguments), _is_kind(takes["alg.policy"], MaskablePolicyArguments)
    id, policy, args = blocks["alg"]["id"], at(blocks, "alg.policy.id"), at(blocks, POLICY)
    if masks and not maskable:
        other = f"maskable_{policy}" if f"maskable_{policy}" in POLICIES else "a maskable policy"
        yield ConfigIssue("alg.policy.id", f"{id} needs a policy with a mask model: {other}, not {policy}")
    elif maskable and not masks:
        plain = policy.removeprefix("maskable_")
        hint = f"; use {plain} with {id}" if plain != policy else ""
        yield ConfigIssue("alg.policy.id", f"{policy} needs alg.id: nlpo, which refreshes its mask model{hint}")
    elif maskable and isinstance(args, Mapping):
        yield from mask_issues(args, POLICY)


def _objective(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check a preference run: its arguments, and keys of supervised runs that its objective does not read."""
    target: Any = targets(blocks).get("alg")
    if run_kind(blocks) != "preference" or target is None:
        return
    id = blocks["alg"]["id"]
    with suppress(TypeError):  # unknown arguments, which are reported where they are bound
        yield from (issue.below("alg.args") for issue in target(**at(blocks, "alg.args") or {}).conflicts())
    if at(blocks, "alg.args.dropout") == "adapters" and not at(blocks, "alg.peft.lora_dropout"):
        yield ConfigIssue("alg.args.dropout", "'adapters' has no effect without alg.peft.lora_dropout above 0")
    if at(blocks, "alg.training_args.label_smoothing_factor"):
        text = "smooths labels of tokens, and this objective has none; dpo has alg.args.label_smoothing"
        yield ConfigIssue("alg.training_args.label_smoothing_factor", text)
    if at(blocks, "alg.training_args.train_sampling_strategy") == "group_by_length":
        yield ConfigIssue("alg.training_args.train_sampling_strategy", "pairs are not grouped by length; use random")
    if target.has_language_model:
        return
    for path in ("train_evaluation.metrics", "alg.generation_kwargs"):
        if at(blocks, path):
            yield ConfigIssue(path, f"{id} writes no text; it is evaluated on the preferences of val and test")
    if at(blocks, "tokenizer.max_length") is not None:
        yield ConfigIssue("tokenizer.max_length", f"{id} reads prompt and response as one text; it cuts no prompts")
    if at(blocks, "alg.peft") is not None and at(blocks, "alg.merge_on_save") is not True:
        text = f"must be true with peft: the output layer of {id} is not part of the adapters"
        yield ConfigIssue("alg.merge_on_save", text)


def _second_derivatives(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that the networks of `trpo` can be differentiated twice."""
    args = at(blocks, POLICY)
    if _is_kind(targets(blocks).get("alg"), TRPOArguments) and isinstance(args, Mapping):
        yield from (issue.below(POLICY) for issue in without_second_derivatives(args))


def _engine(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Check that the generation engine supports the policy and the sampling of rollouts and evaluations."""
    args = at(blocks, POLICY)
    if not isinstance(args, Mapping) or "alg.policy" not in targets(blocks):
        return
    found = engine_issues(args, is_causal="seq2seq" not in str(at(blocks, "alg.policy.id")), path=POLICY)
    yield from found
    id = at(blocks, f"{POLICY}.engine.id")
    if id in (None, OWN_ENGINE) or any(issue.path == f"{POLICY}.engine" for issue in found):
        return
    if isinstance(kwargs := at(blocks, EVALUATION), Mapping):
        yield from unsupported_generation(id, kwargs, EVALUATION)
    if at(blocks, "alg.args.first_token_temperature") is not None:
        text = f"is not supported by the engine {id}; remove it, or use engine: {{id: {OWN_ENGINE}}}"
        yield ConfigIssue("alg.args.first_token_temperature", text)
    if at(blocks, f"{POLICY}.engine.ahead"):
        yield from (ConfigIssue(f"{POLICY}.engine.ahead", text) for text in _against_ahead(blocks))
    target = targets(blocks).get(f"{POLICY}.engine")
    try:
        if isinstance(target, type) and not any(issue.path.startswith(f"{POLICY}.engine.args") for issue in found):
            target(**(at(blocks, f"{POLICY}.engine.args") or {}))
    except ValueError as error:
        yield ConfigIssue(f"{POLICY}.engine.args", str(error))
    except TypeError:  # a missing or unknown argument, reported where `args` are bound
        return


def _against_ahead(blocks: dict[str, Any]) -> Iterator[str]:
    """Return why rollouts cannot be generated during the update before them."""
    algorithm = targets(blocks).get("alg")
    if not _is_kind(algorithm, CorrectedArguments) or getattr(algorithm, "is_pairwise", False):
        yield f"{at(blocks, 'alg.id')} cannot correct for rollouts of older weights; remove it"
    if at(blocks, "env.vec_env") not in (None, "text"):
        yield "needs vec_env: text"
    if at(blocks, "train_evaluation.replay") is not None:
        yield "has no effect in a replay, which generates no rollouts; remove it"


def _split_weights(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find what cannot be trained with weights that are split over the processes."""
    if at(blocks, "distributed.strategy") != "fsdp":
        return
    if (kind := run_kind(blocks)) != "on_policy":
        yield ConfigIssue("distributed.strategy", f"fsdp is only for RL runs, not for {kind} ones; use ddp")
        return
    refused = {
        "alg.id": _is_kind(targets(blocks).get("alg"), (TRPOArguments, NLPOArguments)),
        f"{POLICY}.peft": at(blocks, f"{POLICY}.peft") is not None,
        f"{POLICY}.compile": at(blocks, f"{POLICY}.compile") is True,
    }
    for path in [path for path, is_refused in refused.items() if is_refused]:
        yield ConfigIssue(path, f"{shown(at(blocks, path))} needs whole weights: set distributed.strategy to ddp")


def _devices(blocks: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Find devices of critic and reference model that they cannot have."""
    args = at(blocks, POLICY)
    if not isinstance(args, Mapping):
        return
    yield from device_role_issues(args, POLICY)
    is_split = at(blocks, "distributed.strategy") == "fsdp"
    for key in ("critic_device", "reference_device") if is_split or n_processes() > 1 else ():
        if args.get(key) is not None:
            yield ConfigIssue(f"{POLICY}.{key}", "each of several processes has one device; remove it")


def _is_kind(target: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether the target of a component's `args` is a class of this kind, or of one of these."""
    return isinstance(target, type) and issubclass(target, kind)


def chosen_metric_issues(blocks: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield an error for each selected key that no metric of the config reports, if all reported keys are known."""
    known = _reported(at(blocks, "train_evaluation.metrics"))
    if known is None:
        return
    known += getattr(targets(dict(blocks)).get("alg"), "keys", ())
    if run_kind(blocks) == "on_policy":
        known += METRICS.entry(RUN_REWARD).keys
    for path, wanted in _selected_metrics(blocks).items():
        if not _is_among(wanted, known):
            yield unknown_metric(path, wanted, known)
    best = at(blocks, SUPERVISED)
    if isinstance(best, str) and not _is_among(best.removeprefix("eval_"), ["loss", *known]):
        yield unknown_metric(SUPERVISED, best, ["loss", *known])


def _selected_metrics(blocks: Mapping[str, Any]) -> dict[str, str]:
    """Return config path -> key of a metric that an RL run reads."""
    held_out = at(blocks, HELD_OUT)
    keys = {f"{block}.metric": at(blocks, f"{block}.metric") for block in (PLACE, EARLY_STOPPING)}
    for index, block in enumerate(held_out if isinstance(held_out, list) else []):
        keys[f"{HELD_OUT}.{index}.metric"] = at(block, "metric")
    return {path: key for path, key in keys.items() if isinstance(key, str)}


def reads_run_reward(blocks: Mapping[str, Any]) -> bool:
    """Return whether an RL run reads its own reward as a metric, without listing it among its metrics."""
    known = _reported(at(blocks, "train_evaluation.metrics"))
    if known is None or run_kind(blocks) != "on_policy":
        return False
    keys = METRICS.entry(RUN_REWARD).keys
    return any(_is_among(key, keys) and not _is_among(key, known) for key in _selected_metrics(blocks).values())


def unknown_metric(path: str, wanted: str, known: Iterable[str]) -> ConfigIssue:
    """Return the error for a key at a config path that no metric reports, with the closest known key."""
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
    _pool_files,
    _samplers,
    _chat_template,
    _post_processing,
    _response_lengths,
    _metric_keys,
    _reward_as_metric,
    chosen_metric_issues,
    _optimizer_arguments,
    _adapters,
    _hub_kernels,
    _whole_episodes,
    _split_weights,
    _devices,
    _critic,
    _groups,
    _rollouts_in_episodes,
    _masks,
    _second_derivatives,
    _engine,
    _objective,
)
"""Checks of a bound mapping, in the order in which they run."""

PAGE = "docs/coming_from_trl.md"

ELSEWHERE = {
    "alg.policy.args.model_name": "sft_model_path model_name_or_path policy_model actor_model pretrain",
    "alg.policy.args.reference_model": "ref_model ref_model_path",
    "alg.policy.args.critic_model": "value_model value_model_path critic_pretrain",
    "alg.policy.args.peft": "lora lora_config peft_config",
    "alg.policy.args.generation_kwargs.max_new_tokens": "response_length max_completion_length generate_max_len",
    "env.args.max_prompt_length": "max_prompt_length prompt_max_len",
    "env.n_envs": "rollout_batch_size local_rollout_forward_batch_size",
    "alg.args.learning_rate": "learning_rate actor_learning_rate",
    "alg.args.n_epochs": "ppo_epochs num_ppo_epochs num_iterations max_epochs",
    "alg.args.batch_size": "mini_batch_size num_mini_batches ppo_mini_batch_size train_batch_size",
    "alg.args.micro_batch_size": (
        "per_device_train_batch_size gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size"
    ),
    "alg.args.clip_range": "cliprange clip_ratio eps_clip epsilon",
    "alg.args.clip_range_vf": "cliprange_value value_clip",
    "alg.args.vf_coef": "vf_coef",
    "alg.args.ent_coef": "entropy_coeff entropy_coef",
    "alg.args.gamma": "gamma",
    "alg.args.gae_lambda": "lam lambd",
    "alg.kl_div.coeff": "kl_coef init_kl_coef beta",
    "alg.kl_div.target_kl": "target kl_target",
    "alg.kl_div.horizon": "horizon kl_horizon",
    "alg.kl_div.controller": "adap_kl_ctrl",
    "alg.kl_div.estimator": "kl_estimator kl_penalty",
    "alg.kl_div.norm_reward": "whiten_rewards use_score_scaling",
    "train_evaluation.n_iters": "total_episodes num_episodes max_steps num_train_epochs",
    "train_evaluation.eval_batch_size": "per_device_eval_batch_size",
    "train_evaluation.eval_every": "eval_steps",
    "train_evaluation.save_every": "save_steps",
    "train_evaluation.keep_last": "save_total_limit",
    "reward_fn": "reward_model_path reward_pretrain reward_funcs",
    "datapool": "dataset_name prompt_data",
}
"""Key of this library -> names of the same setting in other libraries."""

HERE = {name: key for key, names in ELSEWHERE.items() for name in names.split()}

_OWN_ARGUMENTS = ("reward_fn.", "datapool.", "train_evaluation.metrics.", "alg.policy.args.peft.")


def with_key_of_here(issue: ConfigIssue, *, is_rl: bool) -> ConfigIssue:
    """Return the error; for an unknown key of another library, with the equivalent key of this library."""
    here = HERE.get(issue.path.rpartition(".")[2])

    # Most keys of supervised and preference runs are those of transformers' Trainer, and have the same names.
    if not is_rl:
        here = "alg.peft" if here == "alg.policy.args.peft" else None
    if here is None or not issue.message.startswith(UNKNOWN_KEY) or issue.path.startswith(_OWN_ARGUMENTS):
        return issue
    return ConfigIssue(issue.path, f"{UNKNOWN_KEY}; the equivalent is {here} ({PAGE})")
