"""Write report.html of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "write report.html of a run"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)


def run(options: argparse.Namespace) -> None:
    """Write the report of a run, and print its path."""
    from rl4lms_like.tracking.report import write_report

    print(write_report(options.run_folder))
