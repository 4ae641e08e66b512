"""List components, one line per id."""

from __future__ import annotations

import argparse

SUMMARY = "list components, one line per id"

KINDS = (
    *("data_pools", "samplers", "rewards", "metrics", "callbacks", "post_processors"),
    *("environments", "policies", "engines", "algorithms", "objectives"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `list`."""
    parser.add_argument("kind", choices=KINDS)


def run(options: argparse.Namespace) -> None:
    """Print the ids of a kind of components."""
    from rl4lms_like.catalogue import listing

    print(listing(options.kind))
