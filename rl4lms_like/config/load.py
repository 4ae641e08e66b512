"""From a YAML file to the config of a run: `load_config`.

    file, --set     a mapping                                  config.yaml_file
    types           blocks and `args`, each made or refused    config.run_config, config.binding
    rules           one block: its method `issues`; several: functions; notices
    RunConfig       or one ConfigError with all errors, in the order of the file

No model is loaded and torch is not imported. The message for an unknown key of TRL, OpenRLHF or verl names the
equivalent key of this library (`core.keys_elsewhere`).
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.algorithms.rules import RULES as ALGORITHM_RULES
from rl4lms_like.algorithms.rules import Algorithm
from rl4lms_like.config import rules
from rl4lms_like.config.binding import RunKind, component_fields, run_kind, special_types
from rl4lms_like.config.functions import with_function_blocks
from rl4lms_like.config.run_config import (
    AlgorithmConfig,
    AnyConfig,
    DialogueConfig,
    PolicyConfig,
    PreferenceConfig,
    RunConfig,
    SupervisedConfig,
    algorithm_of,
    policy_arguments_of,
)
from rl4lms_like.config.yaml_file import apply_overrides, read_yaml
from rl4lms_like.core.keys_elsewhere import with_equivalent
from rl4lms_like.core.kl_estimators import WITH_DISTRIBUTIONS
from rl4lms_like.system.errors import ConfigError, ConfigIssue, Notice
from rl4lms_like.system.schema import Block, at, broken_rules, check_arguments, join, signature_of
from rl4lms_like.system.secrets import secret_issues, without_values
from rl4lms_like.system.wording import shown

MAX_ISSUES = 500
"""Number of errors of a config that are reported; the others are only counted."""

KINDS: dict[RunKind, type[AnyConfig]] = {
    "on_policy": RunConfig,
    "supervised": SupervisedConfig,
    "preference": PreferenceConfig,
}
"""Kind of a run -> class of its config."""

RULES = {
    RunConfig: (*rules.EVERY_RUN, *rules.ON_POLICY),
    SupervisedConfig: (*rules.EVERY_RUN, *rules.OFFLINE),
    PreferenceConfig: (*rules.EVERY_RUN, *rules.OFFLINE),
}
"""Class of a config -> the rules among its blocks, except those of `algorithms.rules`."""

NOTICES = {
    RunConfig: rules.NOTICES,
    SupervisedConfig: rules.OFFLINE_NOTICES,
    PreferenceConfig: rules.OFFLINE_NOTICES,
}
"""Class of a config -> the rules that yield notices."""

_PATHS = {"policy": "alg.policy.args", "kl_div": "alg.kl_div", "ptx": "alg.ptx"}
"""Name of a block in rules -> its path in the file, where it is another one."""

_STRAY_COMMA = re.compile(r"^(true|false),$", re.IGNORECASE)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, data: bool = True) -> AnyConfig:
    """Read a YAML file, apply overrides, and check it, including the first rows of the data files that it names.

    Args:
        path: the file.
        overrides: `alg.args.learning_rate=1e-5`, applied in order.
        data: see `parse_config`; an evaluation only needs the files of one split.

    Raises:
        ConfigError: lists all errors in the file, the overrides and the components' arguments.
    """
    mapping, repeated_keys = read_yaml(path)
    if "alg" not in mapping and not {"models", "post_training"}.isdisjoint(mapping):
        text = f"this file has another format: rl4lms-like post-train --config {shlex.quote(str(path))}"
        raise ConfigError([ConfigIssue("", text)], str(path))
    changed, override_issues = apply_overrides(mapping, overrides)
    return parse_config(changed, source=str(path), issues=repeated_keys + override_issues, data=data)


def parse_config(
    mapping: Mapping[str, Any],
    *,
    source: str = "the config",
    components: bool = True,
    issues: Sequence[ConfigIssue] = (),
    data: bool = False,
) -> AnyConfig:
    """Check a mapping without changing it, and return its config.

    Args:
        mapping: the six blocks of an RL run, or the four of a supervised or preference run.
        source: name of the mapping in error messages.
        components: look up ids and check their `args`; if false, only the blocks themselves are checked.
        issues: errors found before, to be reported with the others.
        data: check that the files of the data pool exist, and that their first rows have the configured columns.

    Raises:
        ConfigError: lists all errors.
    """
    config_class = KINDS[run_kind(mapping)]
    all_issues = list(issues)

    # What a mapping may have in Python only, or names by an import path, becomes blocks.
    mapping, function_issues = with_function_blocks(mapping, imports=components)
    all_issues += function_issues
    written, comma_notices = without_stray_commas(mapping)
    if config_class is RunConfig:
        add_dialogue_defaults(written)
    if components and config_class is RunConfig:
        add_kl_defaults(written)

    # Types: each block is made, or its errors are collected.
    special = special_types if components else None
    fields, type_issues = check_arguments(config_class, written, "", exclude=("notices",), special=special)
    all_issues += at_other_paths(type_issues, function_issues)

    # Rules, of the blocks that were made.
    blocks = {}
    if components:
        blocks = blocks_for_rules(config_class, written, fields)
        all_issues += secret_issues(mapping)
        all_issues += rules.embedded_models(written)
        all_issues += rule_issues(config_class, blocks)

    # The first rows of data files, which are read with the arguments of the pool.
    if data and "datapool" in blocks and not any(issue.path.startswith("datapool") for issue in all_issues):
        all_issues += [issue.below("datapool") for issue in blocks["datapool"].file_issues()]
    ptx = blocks.get("ptx")
    if data and ptx is not None and not any(issue.path.startswith("alg.ptx") for issue in all_issues):
        all_issues += [issue.below("alg.ptx.data") for issue in ptx.data.file_issues()]

    if all_issues:
        raise config_error(mapping, all_issues, source, is_rl=config_class is RunConfig)
    notices: list[Any] = [*comma_notices, *rules.trusted_code(written), *broken_rules(NOTICES[config_class], blocks)]
    config: AnyConfig = config_class(**fields, notices=tuple(notices))
    return config


def at_other_paths(issues: Sequence[ConfigIssue], known: Sequence[ConfigIssue]) -> list[ConfigIssue]:
    """Return the issues at paths without a known one: a refused function is no mapping either."""
    paths = {issue.path for issue in known}
    return [issue for issue in issues if issue.path not in paths]


def unknown_kind(mapping: Mapping[str, Any]) -> ConfigIssue | None:
    """Return the error for an `alg.id` that is unknown, in a file with keys of supervised and preference runs.

    The id says which class checks the file. Checked as an RL run, each of its blocks would be wrong.
    """
    alg = mapping.get("alg")
    if not isinstance(alg, Mapping) or not {"model_type", "training_args"} & alg.keys():
        return None
    id = alg.get("id")
    known = ["supervised", *OBJECTIVES]
    if isinstance(id, str) and (id in known or id in ALGORITHMS or ":" in id):
        return None
    near = difflib.get_close_matches(str(id), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigIssue("alg.id", f"unknown id {shown(id)}; {hint}known, with these keys: {', '.join(known)}")


def without_stray_commas(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], list[Notice]]:
    """Return a copy with booleans in place of texts such as `True,` (Python syntax in YAML), and a notice for each."""
    notices: list[Notice] = []

    def cleaned(value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {key: cleaned(item, join(path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [cleaned(item, join(path, index)) for index, item in enumerate(value)]
        if isinstance(value, str) and _STRAY_COMMA.match(value):
            truth = value[:-1].lower()
            notices.append(Notice(path, f"the text {value!r} is read as {truth}; remove the comma"))
            return truth == "true"
        return value

    return {key: cleaned(item, str(key)) for key, item in mapping.items()}, notices


def add_kl_defaults(mapping: Mapping[str, Any]) -> None:
    """Set placement and estimator of the KL where they are missing: their defaults depend on the algorithm."""
    kl = at(mapping, "alg.kl_div")
    if not isinstance(kl, dict):
        return
    try:
        arguments: Any = ALGORITHMS.arguments_class(str(at(mapping, "alg.id")))
    except ConfigError:  # an error of its own
        arguments = None

    if kl.get("placement") is None:
        kl["placement"] = getattr(arguments, "kl_placement", "reward")
        # An estimator that reads both distributions has a gradient of its own: it is a term of the loss.
        if kl["placement"] == "advantage" and kl.get("estimator") in WITH_DISTRIBUTIONS:
            kl["placement"] = "loss"
    if kl.get("estimator") is None:
        kl["estimator"] = getattr(arguments, "kl_estimator", "k3") if kl["placement"] == "loss" else "k1"


def add_dialogue_defaults(mapping: dict[str, Any]) -> None:
    """Set what a dialogue does not need: the reward, the data pool, and the length of a single response."""
    dialogue = at(mapping, "env.dialogue")
    if not isinstance(dialogue, dict):
        return
    mapping.setdefault("reward_fn", {"id": rules.ENVIRONMENT_REWARD})
    datapool = mapping.setdefault("datapool", {})
    if isinstance(datapool, dict):
        datapool.setdefault("id", rules.NUMBERED_EPISODES)

    # A turn is one call of `generate`: checks, estimates and generation read its length in the arguments of that call.
    length = dialogue.get("max_turn_length", DialogueConfig.max_turn_length)
    policy_args = at(mapping, "alg.policy.args")
    if isinstance(policy_args, dict):
        policy_args.setdefault("generation_kwargs", {})
    for path in ("alg.policy.args.generation_kwargs", "train_evaluation.generation_kwargs"):
        kwargs = at(mapping, path)
        if isinstance(kwargs, dict) and kwargs.get("max_new_tokens") is None:
            kwargs["max_new_tokens"] = length


def blocks_for_rules(
    config_class: type[AnyConfig], mapping: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the blocks without errors by their names in rules.

    Args:
        config_class: of the run.
        mapping: the file.
        fields: the blocks of the file without errors.
    """
    defaults = signature_of(config_class, exclude=("notices",)).defaults
    blocks = {name: block for name, block in defaults.items() if name not in mapping} | dict(fields)
    if config_class is not RunConfig:
        return blocks

    # The `alg` block of an RL run consists of several, each of which may be valid on its own.
    alg = blocks.pop("alg", None)
    alg_fields = component_fields(AlgorithmConfig, mapping.get("alg"))[0] if alg is None else vars(alg)
    if alg_fields.keys() >= {"id", "args"}:
        blocks["alg"] = algorithm_of(alg_fields["id"], alg_fields["args"])
    if "kl_div" in alg_fields:
        blocks["kl_div"] = alg_fields["kl_div"]
    if "ptx" in alg_fields:
        blocks["ptx"] = alg_fields["ptx"]

    policy = alg_fields.get("policy")
    policy_fields = component_fields(PolicyConfig, at(mapping, "alg.policy"))[0] if policy is None else vars(policy)
    if policy_fields.keys() >= {"id", "args"}:
        blocks["policy_id"] = policy_fields["id"]
        policy_arguments = policy_arguments_of(policy_fields["id"], policy_fields["args"])
        if policy_arguments is not None:
            blocks["policy"] = policy_arguments
    return blocks


def rule_issues(config_class: type[AnyConfig], blocks: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return what the rules of single blocks and those among blocks find."""
    issues: list[ConfigIssue] = []
    for name, block in blocks.items():
        if isinstance(block, Block):
            issues += [issue.below(_PATHS.get(name, name)) for issue in block.issues()]
        elif isinstance(block, Algorithm):
            issues += [issue.below("alg.args") for issue in block.arguments.issues()]

    issues += broken_rules(RULES[config_class], blocks)
    if config_class is RunConfig:
        issues += [issue.below("alg") for issue in broken_rules(ALGORITHM_RULES, blocks)]
    return issues


# --- the error ------------------------------------------------------------------------------------------------------


def config_error(mapping: Mapping[str, Any], issues: list[ConfigIssue], source: str, *, is_rl: bool) -> ConfigError:
    """Return the error that lists each issue once, in the order of the file, without the values of secrets."""
    if (issue := unknown_kind(mapping)) is not None:
        return ConfigError([issue], source)
    id = str(at(mapping, "alg.id"))
    settings = algorithm_settings(id)
    unique = []
    for issue in dict.fromkeys(issues):
        unique.append(with_equivalent(issue, is_rl=is_rl, algorithm=id, settings=settings))
    reported = in_order_of_file(mapping, unique)[:MAX_ISSUES]
    more = len(unique) - len(reported)
    counted = [ConfigIssue("", f"and {more} more")] if more else []
    return ConfigError([*without_values(mapping, reported), *counted], source)


def algorithm_settings(id: str) -> list[str] | None:
    """Return the keys of an algorithm in `alg.args`; None if they are not known, or it accepts any."""
    if id == "supervised":
        return []
    try:
        target = (OBJECTIVES if id in OBJECTIVES else ALGORITHMS).arguments_class(id)
    except ConfigError:
        return None
    signature = None if target is None else signature_of(target)
    return None if signature is None or signature.open else [argument.name for argument in signature.arguments]


def in_order_of_file(mapping: Mapping[str, Any], issues: list[ConfigIssue]) -> list[ConfigIssue]:
    """Sort errors by their paths in a file; a missing key comes last in its block, what is in no block first."""
    first: dict[str, int] = {}  # path -> its position
    last: dict[str, int] = {}  # path -> the position of the first path after those below it

    def visit(value: Any, path: str) -> None:
        first[path] = len(first)
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            visit(item, join(path, key))
        last[path] = len(first)

    def position(issue: ConfigIssue) -> float:
        if issue.path in first:
            return first[issue.path]
        block = issue.path
        while block not in first:
            block = block.rpartition(".")[0]
        return last[block] - 0.5 if block else -1

    visit(mapping, "")
    return sorted(issues, key=position)
