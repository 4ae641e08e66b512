"""Upload a run's model to the Hugging Face Hub."""

from __future__ import annotations

import argparse

from rl4lms_like.cli.options import add_no_samples

SUMMARY = "upload a run's model to the Hugging Face Hub"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `push`."""
    parser.add_argument("run", metavar="RUN", help="a run's folder, the folder of one of its models, or OUT of merge")
    parser.add_argument("repo", metavar="REPO", help="account/name, or name in your own account")
    parser.add_argument("--public", action="store_true", help="create a public repository, or upload to one")
    add_no_samples(parser)


def run(options: argparse.Namespace) -> None:
    """Push the model of a run; print which model it was, and what was uploaded."""
    from rl4lms_like.sharing import push_run

    pushed = push_run(options.run, options.repo, is_public=options.public, has_samples=not options.no_samples)
    visibility = "private" if pushed.is_private else "public"
    print(f"{pushed.model} -> {pushed.url} ({visibility})")
    print(f"uploaded: {', '.join(pushed.files)}")
    if pushed.left_out:
        print(f"not uploaded: {', '.join(pushed.left_out)}")
