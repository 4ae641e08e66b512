"""Arguments of `Run` -> config, by the function that parses files; in errors, config paths are names of arguments.

arguments ─ blocks, as in a file ─ defaults of Python ─ parse_config ─> config, path -> argument
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PretrainedConfig

from rl4lms_like.config.load import parse_config
from rl4lms_like.config.run_config import AnyConfig
from rl4lms_like.policies.loading import load_model_config
from rl4lms_like.python_api.argument_names import SOURCE, ArgumentNames
from rl4lms_like.python_api.defaults import add_defaults
from rl4lms_like.python_api.given import (
    argument_error,
    data_block,
    has_conversations,
    has_texts,
    kind_of,
    metric_list,
    model_names,
    weighted_rewards,
)
from rl4lms_like.python_api.setting_names import flat_names, is_set, merged, put, put_default
from rl4lms_like.run import silence_libraries
from rl4lms_like.small_models.embedded import TINY_MODEL, embedded_model, is_embedded
from rl4lms_like.system.errors import ConfigError, ConfigIssue, ModelError, Notice
from rl4lms_like.system.schema import at

OTHER_ARGUMENTS = {
    "alg.id": "algorithm",
    "alg.model_name": "model",
    "alg.policy.args.model_name": "model",
    "train_evaluation.metrics": "metrics",
}
"""Keys of blocks that arguments of `Run` set."""

Result = TypeVar("Result")


def config_of(
    *,
    model: Any,
    prompts: Any,
    reward: Any,
    algorithm: Any,
    data: Any,
    eval_prompts: Any,
    eval_data: Any,
    tokenizer: Any,
    metrics: Any,
    settings: Mapping[str, Any],
) -> tuple[AnyConfig, ArgumentNames, dict[str, Any]]:
    """Return the config of a run, the names of its paths, and the blocks that a file with this config would have.

    The arguments are those of `Run`.

    Raises:
        ConfigError: lists all errors.
    """
    silence_libraries()
    kind, id = kind_of(algorithm)
    names = flat_names(kind, id)
    settings = dict(settings)
    weights = settings.pop("reward_weights", None)
    if isinstance(tokenizer, Mapping):
        settings["tokenizer"] = tokenizer
        tokenizer = tokenizer.get("model_name")
    others = flat_names("supervised", "") if kind == "on_policy" else flat_names("on_policy", "ppo")
    blocks, set_by, issues = merged(settings, names, others)

    def collected(make: Callable[[], Result]) -> Result | None:
        try:
            return make()
        except ConfigError as error:
            issues.extend(error.issues)
            return None

    # What is given as objects.
    for path, argument in OTHER_ARGUMENTS.items():
        if is_set(blocks, path):
            issues.append(ConfigIssue(path, f"is set by the argument {argument} of Run; remove it from the block"))
    model_and_tokenizer = collected(lambda: model_names(model, tokenizer))

    # Runs with rollouts have prompts and a reward, the others have texts to learn from.
    is_rl = kind == "on_policy"
    is_dialogue = is_rl and at(blocks, "env.dialogue") is not None
    if is_rl:
        entries = {"prompts": prompts, "eval_prompts": eval_prompts}
        misplaced = {"data": data, "eval_data": eval_data}
    else:
        entries = {"data": data, "eval_data": eval_data}
        misplaced = {"prompts": prompts, "reward": reward, "eval_prompts": eval_prompts}
    issues += _misplaced(id, misplaced, is_rl=is_rl)
    columns = {
        name: settings.get(name) for name in ("prompt_column", "reference_column", "label_column", "image_column")
    }
    argument = "prompts" if is_rl else "data"

    # A dialogue needs neither data nor a reward: its first texts and its rewards may be those of the environment.
    pool = None
    if not (is_dialogue and prompts is None and eval_prompts is None):
        pool = collected(
            lambda: data_block(
                entries[argument],
                entries[f"eval_{argument}"],
                argument,
                columns,
                is_preference=kind == "preference",
                is_rl=is_rl,
            )
        )
    if is_rl and not (is_dialogue and reward is None and weights is None):
        blocks["reward_fn"] = collected(lambda: weighted_rewards(reward, weights)) or {}
    elif weights is not None:
        issues.append(ConfigIssue("reward_weights", f"{id} learns from data, without rewards; remove it"))
    if metrics is not None:
        put(blocks, "train_evaluation.metrics", metric_list(metrics))

    # Then the defaults, which depend on the model.
    if pool is not None:
        _add_pool(blocks, pool, is_rl=is_rl)
    network = None
    if model_and_tokenizer is not None:
        network = collected(lambda: _network_of(blocks, model_and_tokenizer[0]))
    add_defaults(blocks, kind, id, *(model_and_tokenizer or ("", "")), network)

    argument_names = ArgumentNames(
        _paths(names, set_by, blocks, settings, is_rl=is_rl, has_tokenizer=tokenizer is not None)
    )
    config = _parsed(blocks, issues, argument_names)
    notices = (*argument_names.renamed_notices(config.notices), *_notices(model))
    return replace(config, notices=notices), argument_names, blocks


def _misplaced(id: str, arguments: Mapping[str, Any], *, is_rl: bool) -> list[ConfigIssue]:
    """Return an error for each argument of the other kind of run that has a value."""
    message = f"{id} learns from texts, which are given as data; rollouts need another algorithm, such as 'grpo'"
    if is_rl:
        message = f"{id} learns from prompts and a reward; texts to learn from need algorithm='sft' or 'dpo'"
    return [ConfigIssue(name, message) for name, value in arguments.items() if value is not None]


def _add_pool(blocks: dict[str, Any], pool: Mapping[str, Any], *, is_rl: bool) -> None:
    """Add the data pool; settings of its columns that were given have precedence."""
    for key, value in pool.items():
        if key != "args":
            put_default(blocks, f"datapool.{key}", value)
    for name, value in (pool.get("args") or {}).items():
        put_default(blocks, f"datapool.args.{name}", value)

    files = (pool.get("args") or {}).get("data_files")
    if not isinstance(files, Mapping):
        return
    if has_conversations(files.get("train")):
        put_default(blocks, "tokenizer.chat_template", True)

    # Texts have no prompts from which a text could be generated for a metric.
    if not is_rl and has_texts(files.get("train")) and not is_set(blocks, "train_evaluation.metrics"):
        put_default(blocks, "train_evaluation.generate", False)


def _network_of(blocks: Mapping[str, Any], model: str) -> PretrainedConfig | None:
    """Return the config of the model."""
    if model == TINY_MODEL:
        return None  # a causal model, which is made of the data pool
    trusts = bool(at(blocks, "alg.policy.args.trust_remote_code"))
    try:
        return load_model_config(str(embedded_model(model)) if is_embedded(model) else model, trust_remote_code=trusts)
    except ModelError as error:
        raise argument_error("model", str(error)) from error


def _paths(
    names: Mapping[str, Sequence[str]],
    set_by: Mapping[str, str],
    blocks: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    is_rl: bool,
    has_tokenizer: bool,
) -> dict[str, str]:
    """Return the name of an argument for each path, but not for what was given in a block."""
    paths: dict[str, str] = {}
    for name, paths_of_name in names.items():
        for path in paths_of_name:
            if not is_set(settings, path):
                paths.setdefault(path, name)

    data = "prompts" if is_rl else "data"
    paths |= set_by
    paths |= {
        "alg.id": "algorithm",
        "alg.model_name": "model",
        "alg.policy.args.model_name": "model",
        "tokenizer.model_name": "tokenizer" if has_tokenizer else "model",
        "datapool": data,
        "datapool.args": data,
        "datapool.args.data_files.val": f"eval_{data}",
        "reward_fn": "reward",
        "train_evaluation.metrics": "metrics",
    }
    if isinstance(blocks.get("reward_fn"), list):
        paths["reward_fn.args.rewards"] = "reward"
    return paths


def _parsed(blocks: Mapping[str, Any], issues: Sequence[ConfigIssue], names: ArgumentNames) -> AnyConfig:
    """Parse the blocks of a run; errors found before are reported with those of the config.

    Raises:
        ConfigError: lists all errors, with names of arguments.
    """
    try:
        config = parse_config(blocks, source=SOURCE, data=not issues)
    except ConfigError as error:
        # An argument with an error is missing in the config, or has lost a part: one message is enough.
        reported = {issue.path.partition(".")[0] for issue in issues}
        reported |= {"reward"} if "reward_weights" in reported else set()
        reported |= {name.removeprefix("eval_") for name in reported}
        further = names.renamed(error).issues
        issues = [*issues, *(issue for issue in further if issue.path.partition(".")[0] not in reported)]
    else:
        if not issues:
            return config
    raise ConfigError(list(dict.fromkeys(issues)), SOURCE)


def _notices(model: Any) -> list[Notice]:
    """Return a notice for a loaded model whose weights have a shorter format than those that are trained."""
    dtype = str(getattr(model, "dtype", "torch.float32")).removeprefix("torch.")
    if isinstance(model, str) or dtype == "float32":
        return []
    text = f"was loaded in {dtype}; its weights are trained in float32, dtype='bfloat16' computes with shorter numbers"
    return [Notice("model", text)]
