"""Test which of two runs of a benchmark is better."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "test which of two runs of a benchmark is better"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    help_text = "a benchmark's run, RESULTS/LABEL, or RESULTS for all its runs"
    parser.add_argument("a", metavar="A", type=Path, help=help_text)
    parser.add_argument("b", metavar="B", type=Path, help=help_text)
    parser.add_argument("--metric", action="append", default=[], metavar="KEY", help="default: all; may be repeated")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help="(%(default)s)")


def run(options: argparse.Namespace) -> None:
    """Print the comparison of two runs of a benchmark."""
    from rl4lms_like.benchmarking.results import compare

    print(compare(options.a, options.b, metrics=options.metric, split=options.split))
