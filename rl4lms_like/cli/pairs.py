"""Sample responses of a config's policy, and write the best and worst ones."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl4lms_like.cli.options import add_code, add_config, add_set, arguments_of, count
from rl4lms_like.cli.printing import show

SUMMARY = "sample responses of a config's policy, and write the best and worst ones"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pairs`."""
    add_config(parser)
    parser.add_argument("--out", type=Path, default=Path("pairs.jsonl"), help="JSONL file of the pairs (%(default)s)")
    parser.add_argument("-n", "--n_samples", type=count, default=4, help="responses per prompt (%(default)s)")
    parser.add_argument("--split", choices=("train", "val", "test"), default="train", help="(%(default)s)")
    parser.add_argument("--max_prompts", type=count, help="use only the first N prompts")
    parser.add_argument(
        "--min_difference", type=float, default=0.0, help="minimum difference of the scores of a pair (%(default)s)"
    )
    add_set(parser)
    add_code(parser)


def run(options: argparse.Namespace) -> None:
    """Write pairs of sampled responses, and print the progress."""
    from rl4lms_like.config.load import load_config

    config = load_config(options.config or options.config_path, options.overrides)
    from rl4lms_like.sampled_pairs import write_pairs

    names = "n_samples split max_prompts min_difference"
    write_pairs(config, options.out, **arguments_of(options, names), report=show)
