"""Train the models of a pipeline file on preferences."""

from __future__ import annotations

import argparse

from rl4lms_like.cli.options import add_set, arguments_of
from rl4lms_like.cli.printing import show
from rl4lms_like.system.ranks import is_main_process

SUMMARY = "train the models of a pipeline file on preferences"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `post-train`."""
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file; see docs/preferences.md")
    parser.add_argument("--model-index", type=int, metavar="N", help="train only the model with this index, from 0")
    parser.add_argument("--output-dir", metavar="FOLDER", help="folder of the results; default: training.output_dir")
    parser.add_argument("--resume", action="store_true", help="skip finished models, resume one that ended early")
    parser.add_argument("--dry-run", action="store_true", help="print the output of `check` for each model")
    add_set(parser)


def run(options: argparse.Namespace) -> int:
    """Train the models of the file, or print what `check` says of them."""
    from rl4lms_like.post_train import post_train

    def say(text: str) -> None:
        if is_main_process():
            show(text)

    names = "overrides model_index output_dir resume dry_run"
    return post_train(options.config, **arguments_of(options, names), with_traceback=options.traceback, say=say)
