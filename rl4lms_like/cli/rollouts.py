"""Print the kept episodes of a run."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from rl4lms_like.cli.options import arguments_of, count
from rl4lms_like.cli.printing import print_json, say

SUMMARY = "print the kept episodes of a run"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rollouts`."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("--iteration", type=count, metavar="N", help="only of this iteration")
    parser.add_argument("--min_reward", type=float, metavar="R", help="only episodes with at least this task reward")
    parser.add_argument("--max_reward", type=float, metavar="R", help="only episodes with at most this task reward")
    parser.add_argument("--contains", metavar="TEXT", help="only episodes with this text in prompt or response")
    parser.add_argument("--limit", type=count, metavar="N", help="only the first N of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(options: argparse.Namespace) -> None:
    """Print the kept episodes that meet the conditions."""
    from rl4lms_like.tracking.rollouts import described, episodes_of

    # Printed one by one: the files of a long run may not fit into memory.
    episodes = episodes_of(options.run_folder, **arguments_of(options, "iteration min_reward max_reward contains"))
    episode = None
    for episode in islice(episodes, options.limit):
        if options.json:
            print_json(episode)
        else:
            print(described(episode))

    # To standard error, so that the output stays JSON lines.
    if episode is None:
        say("no episode meets these conditions\n")
