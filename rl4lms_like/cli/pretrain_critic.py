"""Train only the critic of a config, and save it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl4lms_like.cli.options import add_code, add_config, add_set
from rl4lms_like.cli.printing import show

SUMMARY = "train only the critic of a config, and save it"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pretrain-critic`."""
    add_config(parser)
    parser.add_argument("--output", type=Path, default=Path("critic"), help="folder of the critic (%(default)s)")
    add_set(parser)
    add_code(parser)


def run(options: argparse.Namespace) -> None:
    """Train the critic of a config, and print the progress."""
    from rl4lms_like.run import pretrain_critic

    config_path = options.config or options.config_path
    for line in pretrain_critic(config_path, options.output, overrides=options.overrides):
        show(line)
