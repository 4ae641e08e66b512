"""Options that several commands have, and what becomes of them."""

from __future__ import annotations

import argparse
from typing import Any

from rl4lms_like.system.errors import ConfigError, ConfigIssue

DEFAULT_ALGORITHM = "grpo"
"""Algorithm of a run without a file that names none."""

SHORT_RUN_OPTIONS = ("--data", "--eval_data", "--reward_fn", "--alg", "--print-config")
"""Options that only a run without a file has, besides `--model`."""


def arguments_of(options: argparse.Namespace, names: str) -> dict[str, Any]:
    """Return the options with these names as keyword arguments."""
    return {name: getattr(options, name) for name in names.split()}


def engine_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the argument `engine`, if it is given."""
    from rl4lms_like.config.yaml_file import parse_value

    if options.engine is None:
        return {}
    try:
        return {"engine": parse_value(options.engine)}
    except ValueError as error:
        raise ConfigError([ConfigIssue("", str(error))], "--engine") from error


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add RL4LMs' flags, for `train` and for `scripts/training/train_text_generation.py`."""
    parser.add_argument("--project_name", default="rl4lm_exps", help="second part of the run path (%(default)s)")
    parser.add_argument("--experiment_name", default="rl4lm_experiment", help="last part of the run path (%(default)s)")
    parser.add_argument("--entity_name", help="account or team in Weights & Biases")
    parser.add_argument("--base_path_to_store_results", default=".", help="first part of the run path (.)")
    parser.add_argument("--log_to_wandb", action="store_true", help="log to Weights & Biases")
    parser.add_argument("--log_to_trackio", action="store_true", help="log to Trackio")
    parser.add_argument("--new", action="store_true", help="start a new run even if one of this config can be resumed")
    add_set(parser)
    add_code(parser)


def given_run_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_run_options` without `--set` and `--code` that differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    defaults = vars(parser.parse_args([]))

    # `check` has only some of them.
    changed = {}
    for name, default in defaults.items():
        value = getattr(options, name, default)
        if value != default and name not in ("overrides", "code"):
            changed[name] = value
    return changed


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, which overrides values of the config."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="override a config value, e.g. alg.args.learning_rate=1e-5; may be repeated",
    )


def add_change(parser: argparse.ArgumentParser) -> None:
    """Add `--change`, which changes what a resumed run computes."""
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="changes",
        help="with --resume: change a setting that affects results from here on; the run folder lists it",
    )


def changes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `--change` by config path."""
    from rl4lms_like.config.yaml_file import parse_assignments

    changes, issues = parse_assignments(options.changes, "--change")
    if issues:
        raise ConfigError(issues, "the command line")
    return dict(changes)


def add_code(parser: argparse.ArgumentParser) -> None:
    """Add `--code`, the folders of the user's own modules."""
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with your own modules that the config names, often `.`; may be repeated",
    )


def add_config(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the config, as argument or as RL4LMs' option; return their group, one of which is required."""
    config = parser.add_mutually_exclusive_group(required=True)
    config.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file")
    config.add_argument("--config_path", help="YAML file (RL4LMs' spelling)")
    return config


def add_short_run(parser: argparse.ArgumentParser, config: argparse._MutuallyExclusiveGroup) -> None:
    """Add the options of a run without a file; `--model` to the group of the config, which it replaces."""
    config.add_argument("--model", metavar="MODEL", help="train without a file: name or folder of the model")

    # They have no defaults here, so that one that is used with a file is noticed.
    parser.add_argument(
        "--data", metavar="DATA", help="with --model: file of prompts, pairs or texts, or the id of a data pool"
    )
    parser.add_argument("--eval_data", metavar="FILE", help="with --model: file of the same kind, for evaluations")
    parser.add_argument(
        "--reward_fn",
        action="append",
        metavar="REWARD",
        help="with --model: FILE.py:NAME of a function, or the id of a reward; repeated: their sum",
    )
    parser.add_argument("--alg", metavar="ALG", help=f"with --model: id of the algorithm ({DEFAULT_ALGORITHM})")
    parser.add_argument(
        "--print-config",
        dest="print_config",
        action="store_true",
        help="with --model: only print the config, and the command that trains it",
    )


def refuse_options_of_short_runs(options: argparse.Namespace) -> None:
    """Raise if options of a run without a file are used without `--model`, because they would be ignored."""
    message = "it is for a run without a file, with --model"
    issues = []
    for option in SHORT_RUN_OPTIONS:
        if getattr(options, option.removeprefix("--").replace("-", "_")):
            issues.append(ConfigIssue(option, message))
    if issues:
        raise ConfigError(issues, "the command line")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust_remote_code`."""
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run code that is part of a model, if the config in the run's folder requires it",
    )


def add_no_samples(parser: argparse.ArgumentParser) -> None:
    """Add `--no_samples`."""
    parser.add_argument("--no_samples", action="store_true", help="leave prompts and responses out of the model card")


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Add the options of decoding that `evaluate` and `generate` share."""
    parser.add_argument("--decoding", choices=("sampling", "greedy", "beam"), help="default: as in training")
    parser.add_argument("--max_new_tokens", type=count, help="maximum length of a response")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (%(default)s)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add `--engine`."""
    example = "{id: vllm, args: {url: URL, weights_dir: FOLDER}}"
    parser.add_argument(
        "--engine", metavar="ENGINE", help=f"generate with an external engine, as in a config: {example}"
    )


def count(value: str) -> int:
    """Parse a whole number of at least 1."""
    # `isdecimal` also excludes what `int` accepts: ` 1`, `1_000`, `+1`.
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {value!r}")
    return int(value)
