"""Runs without a file: `--model M --data prompts.jsonl --reward_fn my_rewards.py:score --alg grpo --set NAME=VALUE`.

The config is that of `Run` in Python, whose arguments the options are:

    --model, --alg          model, algorithm
    --data, --eval_data     prompts and eval_prompts; data and eval_data of runs that learn from texts
    --reward_fn             reward; several of them: a list
    --set NAME=VALUE        any other argument: a setting by its name, or a key by its path in a file

The paths of model, data and rewards are made absolute, so that the run can be continued from another folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.cli.options import DEFAULT_ALGORITHM, given_run_options
from rl4lms_like.config.functions import with_function_blocks
from rl4lms_like.config.run_config import AnyConfig
from rl4lms_like.config.yaml_file import apply_values, dump_yaml, parse_assignments, parse_value
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.python_api.argument_names import SOURCE, ArgumentNames
from rl4lms_like.python_api.given import kind_of
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.import_paths import code_options, use_code_from

OPTION_OF = {
    "model": "--model",
    "alg.model_name": "--model",
    "alg.policy.args.model_name": "--model",
    "algorithm": "--alg",
    "alg.id": "--alg",
    "prompts": "--data",
    "data": "--data",
    "eval_prompts": "--eval_data",
    "eval_data": "--eval_data",
    "reward": "--reward_fn",
    "reward_fn": "--reward_fn",
    "folder": "--experiment_name",
}
"""Arguments of `Run` and keys of a file -> the option that sets them."""

BLOCKS = ("tokenizer", "reward_fn", "datapool", "env", "alg", "train_evaluation")
"""Blocks of a file, in the order in which they are printed; all others follow."""

FILE = "run.yml"
"""Name under which the printed config is saved in the command that trains it."""


@dataclass(frozen=True)
class ShortRun:
    """Run that the command line describes.

    Args:
        config: its config.
        names: names for config paths, in errors.
        blocks: what the command has set, as the blocks of a file.
    """

    config: AnyConfig
    names: ArgumentNames
    blocks: dict[str, Any]


def short_run(options: argparse.Namespace) -> ShortRun:
    """Return the run that the options describe.

    Raises:
        ConfigError: lists all errors, with the names of options.
    """
    settings, issues = _settings(options.overrides)
    if getattr(options, "replay", None) is not None:
        settings["replay"] = os.path.abspath(options.replay)
    metrics = settings.pop("metrics", None)
    tokenizer = settings.pop("tokenizer", None)

    algorithm = options.alg or DEFAULT_ALGORITHM
    is_rl = _is_rl(algorithm)
    data, data_issues = _data(options.data)
    rewards, reward_issues = _rewards(options.reward_fn or [], is_needed=is_rl is True)
    issues += [*data_issues, *reward_issues]

    # Loads transformers, which takes seconds.
    from rl4lms_like.python_api.arguments import config_of

    texts, eval_texts = ("prompts", "eval_prompts") if is_rl else ("data", "eval_data")
    entries = {"prompts": None, "data": None, "eval_prompts": None, "eval_data": None}
    entries |= {texts: data, eval_texts: options.eval_data}
    try:
        with named_as_options():
            config, names, blocks = config_of(
                model=_absolute_folder(options.model),
                reward=rewards,
                algorithm=algorithm,
                tokenizer=_absolute_folder(tokenizer),
                metrics=metrics,
                settings=settings,
                **entries,
            )
    except ConfigError as error:
        # What is missing here is missing there, too.
        reported = {issue.path for issue in issues}
        issues += [issue for issue in error.issues if issue.path not in reported]
    if issues:
        raise ConfigError(issues, "the command line")
    return ShortRun(config, names, blocks)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Rename arguments of `Run` in a `ConfigError` that is raised within the context: they are options here."""
    try:
        yield
    except ConfigError as error:
        issues = [ConfigIssue(_option(issue.path), issue.message) for issue in error.issues]
        source = "the command line" if error.source in (SOURCE, "the config") else error.source
        raise ConfigError(issues, source) from error.__cause__


def _option(path: str) -> str:
    """Return the option for an argument of `Run`, with what is below it: `reward.args.size`, `learning_rate`."""
    argument, _, below = path.partition(".")
    if argument not in OPTION_OF:
        return path
    is_value = below.rpartition(".")[2] == "id"  # what the option itself gives
    return OPTION_OF[argument] if is_value or not below else f"{OPTION_OF[argument]} {below}"


def _is_rl(algorithm: str) -> bool | None:
    """Return whether an algorithm learns from rollouts; None for an unknown one, which is reported elsewhere."""
    try:
        return kind_of(algorithm)[0] == "on_policy"
    except ConfigError:
        return None


def _settings(overrides: Sequence[str]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return the arguments of `Run` that `--set` sets, and the errors; later ones replace earlier ones."""
    assignments, issues = parse_assignments(overrides, "--set")
    settings: dict[str, Any] = {}
    for path, value in assignments:
        option = OPTION_OF.get(path) or OPTION_OF.get(path.partition(".")[0])
        if option is not None:
            has_block = option in ("--reward_fn", "--data") and ".args" in path
            block = " '{id: ..., args: {...}}'" if has_block else ""
            issues.append(ConfigIssue(f"--set {path}", f"is set by {option}{block}; remove it"))
            continue
        key = "metrics" if path == "train_evaluation.metrics" else path
        settings, path_issues = apply_values(settings, {key: value}, "--set")
        issues += path_issues
    return settings, issues


def _data(text: str | None) -> tuple[Any, list[ConfigIssue]]:
    """Return the value of `--data` as an argument of `Run`, and the errors in it."""
    if text is None:
        message = "missing; expected a file of rows (JSON Lines, JSON, CSV, parquet), or the id of a data pool"
        return None, [ConfigIssue("--data", message)]
    data, issues = _component(text, "--data")
    is_name = isinstance(data, str) and ":" not in data
    if not issues and is_name and data not in DATA_POOLS and not with_home(data).is_file():
        message = f"there is no file {text!r}, and no data pool of this name (rl4lms-like list data_pools)"
        issues.append(ConfigIssue("--data", message))
    return data, issues


def _rewards(texts: Sequence[str], *, is_needed: bool) -> tuple[Any, list[ConfigIssue]]:
    """Return the values of `--reward_fn` as an argument of `Run`, and the errors in them."""
    if not texts:
        message = "missing; expected FILE.py:NAME of a function, or the id of a reward (rl4lms-like list rewards)"
        return None, [ConfigIssue("--reward_fn", message)] if is_needed else []
    rewards = []
    issues = []
    for text in texts:
        reward, reward_issues = _component(text, "--reward_fn")
        rewards.append(reward)
        issues += reward_issues
    return rewards if len(rewards) > 1 else rewards[0], issues


def _component(text: str, option: str) -> tuple[Any, list[ConfigIssue]]:
    """Return the component that an option names, and the errors: an id, an import path or a block.

    The file of a `FILE.py:NAME` is code that the user has named, so its folder needs no `--code`.
    """
    if text.startswith("{"):
        try:
            return parse_value(text), []
        except ValueError as error:
            return None, [ConfigIssue(option, str(error))]

    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        return text, []
    path = Path(os.path.abspath(with_home(file)))
    if not path.is_file():
        return text, [ConfigIssue(option, f"there is no file {file!r}")]
    use_code_from(path.parent)
    return f"{path}:{name}", []


def _absolute_folder(model: Any) -> Any:
    """Return the absolute path of a folder; another name of a model as it is."""
    is_folder = isinstance(model, str) and with_home(model).is_dir()
    return os.path.abspath(with_home(model)) if is_folder else model


def printed_config(run: ShortRun, options: argparse.Namespace) -> str:
    """Return what a command has set, as a file, with the command that trains the file as a comment."""
    words = ["rl4lms-like", "train", FILE]
    for name, value in given_run_options(options).items():
        words += [f"--{name}"] if value is True else [f"--{name}", shlex.quote(value)]
    command = " ".join(words) + code_options()

    # Rewards with weights, which only Python has as pairs, become blocks.
    written, _ = with_function_blocks(run.blocks, imports=False)
    blocks = {name: written[name] for name in BLOCKS if name in written}
    return f"# Saved as {FILE}, this is trained by\n#   {command}\n{dump_yaml(_id_first(blocks | written))}".rstrip()


def _id_first(block: Any) -> Any:
    """Return a block with the key `id` before the others, also within it."""
    if not isinstance(block, Mapping):
        return block
    return {key: _id_first(block[key]) for key in sorted(block, key=lambda key: key != "id")}
