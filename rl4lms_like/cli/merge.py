"""Write a run's model with whole weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl4lms_like.cli.options import add_code, add_no_samples, add_trust

SUMMARY = "write a run's model with whole weights, its adapters merged"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `merge`."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, or the folder of one of its models")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to create")
    add_no_samples(parser)
    add_code(parser)
    add_trust(parser)


def run(options: argparse.Namespace) -> None:
    """Merge the model of a run; print which model it was."""
    from rl4lms_like.sharing import merge_run

    model = merge_run(
        options.run,
        options.out,
        trust_remote_code=options.trust_remote_code,
        has_samples=not options.no_samples,
    )
    print(f"{model} -> {options.out}")
