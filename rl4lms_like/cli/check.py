"""Check a YAML config or the options of a run without a file, and show a summary."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rl4lms_like.cli.options import add_code, add_config, add_set, add_short_run, refuse_options_of_short_runs
from rl4lms_like.cli.printing import show
from rl4lms_like.system.errors import ConfigError, ConfigIssue

if TYPE_CHECKING:
    from rl4lms_like.config.run_config import AnyConfig

SUMMARY = "check a YAML config, or a run without a file, and show a summary"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    add_short_run(parser, add_config(parser))
    parser.add_argument("--full", action="store_true", help="also print the config with all defaults")
    parser.add_argument("--time", action="store_true", help="also load the models, and time an iteration")
    parser.add_argument(
        "--gpu_memory",
        type=_gigabytes,
        dest="gpu_bytes",
        metavar="GB",
        help="estimate for a GPU with so many GB (10^9 bytes) instead of this machine's device",
    )
    parser.add_argument("--reward", action="store_true", help="also audit the reward: call it with texts to exploit it")
    parser.add_argument("--remote", action="store_true", help="with --reward: also call a reward on a server")
    add_set(parser)
    add_code(parser)


def _gigabytes(value: str) -> int:
    """Parse a number of GB above 0; return it in bytes."""
    try:
        n_bytes = int(float(value) * 10**9)
    except (ValueError, OverflowError):  # no number, nan or infinity
        n_bytes = 0
    if n_bytes <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {value!r}")
    return n_bytes


def run(options: argparse.Namespace) -> None:
    """Print the summary of a config section by section, and the audit of its reward."""
    if options.remote and not options.reward:
        raise ConfigError([ConfigIssue("--remote", "it can be used only with --reward")], "the command line")
    if options.model is None:
        from rl4lms_like.config.load import load_config

        refuse_options_of_short_runs(options)
        _show_sections(load_config(options.config or options.config_path, options.overrides), options)
        return

    from rl4lms_like.cli.short_run import named_as_options, printed_config, short_run

    described = short_run(options)
    if options.print_config:
        show(printed_config(described, options))
        return
    with named_as_options(), described.names:
        _show_sections(described.config, options)


def _show_sections(config: AnyConfig, options: argparse.Namespace) -> None:
    # After the config, whose errors are shown without the seconds that this import takes: it loads torch.
    from rl4lms_like.preview import preview, reward_audit, time_section

    # Each section as soon as it is ready: the audit calls the reward, which may take long.
    for section in preview(config, full=options.full, gpu_bytes=options.gpu_bytes):
        show(section)
    if options.time:
        show(time_section(config))
    if options.reward:
        for section in reward_audit(config, remote=options.remote):
            show(section)
