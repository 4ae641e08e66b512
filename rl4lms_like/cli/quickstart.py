"""Train the built-in example; has its own options."""

from __future__ import annotations

import argparse

SUMMARY = "train the built-in example; has its own options"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the quickstart has a parser of its own."""


def run(options: argparse.Namespace) -> int | None:
    """Run the quickstart with the options that its own parser reads."""
    from rl4lms_like.quickstart import main as quickstart

    return quickstart(options.unknown)
