"""All commands by name, and the parser of the command line."""

from __future__ import annotations

import argparse
from types import ModuleType

from rl4lms_like.cli import (
    benchmark,
    check,
    compare,
    env,
    evaluate,
    generate,
    list_components,
    merge,
    pairs,
    play,
    post_train,
    pretrain_critic,
    push,
    quickstart,
    report,
    rollouts,
    serve_reward,
    show,
    train,
)

EXIT_STATUS = (
    "Exit status: 0 success, 1 a run failed for the reason that is printed, "
    "2 errors in the config or the command line, 130 interrupted."
)

COMMANDS: dict[str, ModuleType] = {
    "train": train,
    "check": check,
    "post-train": post_train,
    "evaluate": evaluate,
    "generate": generate,
    "play": play,
    "merge": merge,
    "push": push,
    "list": list_components,
    "show": show,
    "quickstart": quickstart,
    "report": report,
    "rollouts": rollouts,
    "benchmark": benchmark,
    "compare": compare,
    "pairs": pairs,
    "pretrain-critic": pretrain_critic,
    "serve-reward": serve_reward,
    "env": env,
}
"""Name -> module of a command, in the order of `rl4lms-like --help`. A module has

    SUMMARY        what the command does, in one line
    add_options    adds its arguments to a parser
    run            runs it with the parsed options; returns the exit status, or None for success
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rl4lms-like", description="Reinforcement learning for language models.", epilog=EXIT_STATUS
    )
    parser.set_defaults(code=[])  # of commands that name no code
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = module.SUMMARY
        description = summary[0].upper() + summary[1:] + "."
        # `quickstart --help` is answered by a parser of its own.
        command = commands.add_parser(name, help=summary, description=description, add_help=module is not quickstart)
        command.add_argument("--traceback", action="store_true", help="print the traceback of an error")
        module.add_options(command)
    return parser
