"""Play episodes with an environment: a person, its scripted player or a model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rl4lms_like.cli.options import add_code, add_trust, arguments_of, count
from rl4lms_like.cli.printing import show
from rl4lms_like.system.errors import ConfigError, RL4LMsLikeError

SUMMARY = "play against an environment, or print the episodes of a model"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `play`."""
    parser.add_argument("environment", metavar="ENV", help="id of an environment, or an import path")
    players = parser.add_mutually_exclusive_group()
    players.add_argument(
        "model", nargs="?", metavar="MODEL_OR_RUN", help="a model that plays; default: you, by typing the turns"
    )
    players.add_argument("--scripted", action="store_true", help="the scripted player of the environment plays")
    parser.add_argument(
        "--args",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="arguments",
        help="argument of the environment; may be repeated",
    )
    parser.add_argument("--episodes", type=count, default=1, help="number of episodes (%(default)s)")
    parser.add_argument("--max_turns", type=count, help="maximum number of turns of an episode; default: the run's")
    parser.add_argument("--seed", type=int, default=0, help="seed of the environment and of the sampling (%(default)s)")
    add_code(parser)
    add_trust(parser)


def run(options: argparse.Namespace) -> None:
    """Play episodes, and print them and their mean reward."""
    from rl4lms_like.config.yaml_file import parse_assignments

    assignments, issues = parse_assignments(options.arguments, "--args")
    if issues:
        raise ConfigError(issues, "the command line")
    args: dict[str, Any] | None = dict(assignments) or None  # None: those of the run

    from rl4lms_like.playing import play

    names = "environment model scripted episodes max_turns seed trust_remote_code"
    play(**arguments_of(options, names), args=args, read=_typed, show=show)


def _typed() -> str:
    """Return the next line of standard input.

    Raises:
        EOFError: the input has ended.
        KeyboardInterrupt: Ctrl-C was typed.
    """
    if sys.stdin is None:
        raise EOFError
    try:
        line = input("> ")
        line.encode()  # undecodable bytes are read as lone surrogates, which tokenizers reject
    except (EOFError, KeyboardInterrupt):
        show("")  # the line of the prompt has no end
        raise
    except UnicodeError as error:
        raise RL4LMsLikeError(f"the input is not text in {sys.stdin.encoding}") from error
    return line
