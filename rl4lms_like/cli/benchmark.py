"""Run several configs with several seeds, and write a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl4lms_like.cli.options import add_code, arguments_of, count

SUMMARY = "run several configs with several seeds, and write a report"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `benchmark`."""
    parser.add_argument("spec", metavar="SPEC", type=Path, help="YAML file; see docs/benchmarking.md")
    parser.add_argument("--processes", type=count, metavar="N", help="number of parallel runs; default: the spec's")
    parser.add_argument(
        "--seeds", type=_seeds, metavar="N", help="number of seeds, or a list such as 0,3,7; default: the spec's"
    )
    parser.add_argument("--only", action="append", default=[], metavar="LABEL", help="only this run; may be repeated")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="folder of the results; default: the spec's")
    add_code(parser)
    parser.add_argument("--report-only", action="store_true", help="run nothing, report existing results")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="run on this Ray cluster: auto, HOST:PORT, or local for a new one"
    )


def run(options: argparse.Namespace) -> int:
    """Run what is left of a benchmark, and write its report."""
    from rl4lms_like.benchmarking.runner import benchmark

    return benchmark(options.spec, **arguments_of(options, "processes seeds only results report_only ray"))


def _seeds(value: str) -> int | list[int]:
    """Parse the number of seeds, or the seeds themselves, separated by commas."""
    if "," not in value:
        return count(value)
    seeds = value.split(",")
    if not all(seed.isdecimal() for seed in seeds):
        raise argparse.ArgumentTypeError(f"expected whole numbers as in 0,3,7, got {value!r}")
    return [int(seed) for seed in seeds]
