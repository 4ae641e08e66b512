"""Serve a sequence classifier to the reward `http` of several processes."""

from __future__ import annotations

import argparse
from typing import Any

from rl4lms_like.cli.printing import say, show
from rl4lms_like.system.errors import ConfigError, ConfigIssue

SUMMARY = "serve a reward model to the reward `http` of several processes"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve-reward`."""
    parser.add_argument("model", metavar="MODEL", help="hub id or local folder of a sequence classifier")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="its port; 0 for any free one (%(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="arguments",
        help="argument of the reward `reward_model`, e.g. template=chat; may be repeated",
    )


def run(options: argparse.Namespace) -> None:
    """Answer requests until Ctrl-C."""
    from rl4lms_like.run import silence_libraries

    silence_libraries()
    reward = _reward(options)
    from rl4lms_like.rewards.server import RewardServer
    from rl4lms_like.scoring.score import Texts

    # The port first: that it is in use is known before the model is loaded. Loading fails before the first request.
    with RewardServer(reward.scores, host=options.host, port=options.port, max_texts=reward.batch_size) as server:
        server.scoring.scores(Texts([""], ["."], [[]], [None]))
        show(f"{options.model} scores at {server.url}; stop with Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped\n")


def _reward(options: argparse.Namespace) -> Any:
    """Return the reward `reward_model` of the model, with the arguments of the command line."""
    from rl4lms_like.config.binding import SHAPING, build_component, component_fields
    from rl4lms_like.config.run_config import RewardConfig
    from rl4lms_like.config.yaml_file import parse_assignments

    assignments, issues = parse_assignments(options.arguments, "--set")
    arguments = dict(assignments)
    for name in ("model_name", SHAPING):
        if name in arguments:
            issues.append(
                ConfigIssue(f"--set {name}", "the server scores with the one model that is the argument MODEL")
            )
    fields, field_issues = component_fields(
        RewardConfig, {"id": "reward_model", "args": {**arguments, "model_name": options.model}}
    )
    for issue in field_issues:
        issues.append(ConfigIssue(issue.path.replace("args.", "--set ", 1), issue.message))
    if issues:
        raise ConfigError(issues, "the command line")
    return build_component(RewardConfig.registry, RewardConfig(**fields))
