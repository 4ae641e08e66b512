"""Train a model with a YAML config, or with the options of a run without a file."""

from __future__ import annotations

import argparse

from rl4lms_like.cli.options import (
    add_change,
    add_config,
    add_run_options,
    add_short_run,
    add_trust,
    arguments_of,
    changes_of,
    given_run_options,
    refuse_options_of_short_runs,
)
from rl4lms_like.cli.printing import show
from rl4lms_like.system.errors import ConfigError, ConfigIssue

SUMMARY = "train a model with a YAML config, or without a file"

DESTINATIONS = "entity_name log_to_wandb log_to_trackio"
"""Options that say where else the numbers of a run go."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    # In the group of the config: a run resumes with the config in its folder.
    config = add_config(parser)
    config.add_argument(
        "--resume", metavar="PATH", help="resume a run that ended early: its folder, or one of its checkpoints"
    )
    add_short_run(parser, config)

    parser.add_argument(
        "--replay",
        metavar="RUN[:N-M]",
        help="train on the kept rollouts of this run folder, of all iterations or some (RUN:5, RUN:3-7)",
    )
    add_change(parser)
    add_trust(parser)
    add_run_options(parser)


def run(options: argparse.Namespace) -> None:
    """Train as a config says, or resume a run."""
    if options.model is None:
        refuse_options_of_short_runs(options)
    if options.resume is not None:
        from rl4lms_like.run import resume

        _refuse_another_folder(options)
        if options.replay is not None:
            message = "a run resumes with the rollouts that it began with; remove the option"
            raise ConfigError([ConfigIssue("--replay", message)], "the command line")
        changes = changes_of(options)
        names = f"overrides trust_remote_code {DESTINATIONS}"
        resume(options.resume, values=changes, accepted=list(changes), **arguments_of(options, names))
        return

    if options.changes:
        message = "it can be used only with --resume; a new run is changed by --set, or in its file"
        raise ConfigError([ConfigIssue("--change", message)], "the command line")

    # The option permits what the config in a run's folder asks for, which may come from another user. A file that the
    # user names needs no second permission.
    if options.trust_remote_code:
        message = "it can be used only with --resume; in a config, set trust_remote_code next to the model's name"
        raise ConfigError([ConfigIssue("--trust_remote_code", message)], "the command line")

    if options.model is not None:
        _train_short(options)
        return

    from rl4lms_like.python_api.python_run import train

    names = f"project_name experiment_name base_path_to_store_results overrides replay new {DESTINATIONS}"
    train(options.config or options.config_path, **arguments_of(options, names))


def _train_short(options: argparse.Namespace) -> None:
    """Train a run without a file, or only print its config."""
    from rl4lms_like.cli.short_run import named_as_options, printed_config, short_run
    from rl4lms_like.python_api.python_run import Run
    from rl4lms_like.tracking.run_folder import experiment_folder

    described = short_run(options)
    if options.print_config:
        show(printed_config(described, options))
        return
    folder = experiment_folder(options.base_path_to_store_results, options.project_name, options.experiment_name)
    run = Run(config=described.config, folder=folder)
    with named_as_options(), described.names:
        run.train(new=options.new, keep_last_state=False, **arguments_of(options, DESTINATIONS))


def _refuse_another_folder(options: argparse.Namespace) -> None:
    """Raise if options that name another folder are given with --resume, because they would be ignored."""
    names = ("project_name", "experiment_name", "base_path_to_store_results", "new")
    used = [name for name in given_run_options(options) if name in names]
    if used:
        message = "a run resumes in its own folder; remove the option, or copy the folder and resume the copy"
        raise ConfigError([ConfigIssue(f"--{name}", message) for name in used], "the command line")
