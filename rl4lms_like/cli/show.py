"""Show the description and arguments of a component."""

from __future__ import annotations

import argparse

from rl4lms_like.cli.options import add_code

SUMMARY = "show the description and arguments of a component"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `show`."""
    parser.add_argument("id", metavar="ID", help="an id, or an import path package.module:Name")
    add_code(parser)


def run(options: argparse.Namespace) -> None:
    """Print the description of an id."""
    from rl4lms_like.catalogue import description

    print(description(options.id))
