"""What can be typed: every command with its options."""

from __future__ import annotations

import argparse
from pathlib import Path

EXIT_STATUS = (
    "Exit status: 0 done, 1 a run failed for the reason that is printed, "
    "2 mistakes in the config or the command line, 130 interrupted."
)
KINDS = ("data_pools", "rewards", "metrics", "post_processors", "policies", "algorithms")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="rl4lms-like", description="Reinforcement learning for language models.", epilog=EXIT_STATUS
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_train(_command(commands, "train", "train a model as a YAML file says"))
    _add_check(_command(commands, "check", "check a YAML file, and show what it amounts to"))
    _add_evaluate(_command(commands, "evaluate", "measure a run's model, or any model, on a split"))
    _add_generate(_command(commands, "generate", "write texts with a tuned model"))
    command = _command(commands, "list", "list components, one line an id")
    command.add_argument("kind", choices=KINDS)
    command = _command(commands, "show", "show what a component is and takes")
    command.add_argument("id", metavar="ID", help="an id, or an import path package.module:Name")
    _add_code(command)
    _command(commands, "quickstart", "train the embedded default; takes options of its own", own_help=True)
    command = _command(commands, "report", "write report.html of a run")
    command.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    _add_benchmark(_command(commands, "benchmark", "run many configs with many seeds, and report"))
    _add_compare(_command(commands, "compare", "say which of two runs of a benchmark is better"))
    return parser


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """RL4LMs' flags, for `train` and for `scripts/training/train_text_generation.py`."""
    parser.add_argument("--project_name", default="rl4lm_exps", help="second folder of the results (%(default)s)")
    parser.add_argument("--experiment_name", default="rl4lm_experiment", help="third folder (%(default)s)")
    parser.add_argument("--entity_name", help="of Weights & Biases")
    parser.add_argument("--base_path_to_store_results", default=".", help="first folder (the current one)")
    parser.add_argument("--log_to_wandb", action="store_true", help="log to Weights & Biases")
    parser.add_argument("--new", action="store_true", help="begin a new run, even if one of this config can go on")
    _add_set(parser)
    _add_code(parser)


def _command(
    commands: argparse._SubParsersAction, name: str, summary: str, *, own_help: bool = False
) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, add_help=not own_help
    )
    command.add_argument("--traceback", action="store_true", help="show where an error came from")
    return command


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="change the config, as in alg.args.learning_rate=1e-5; may be repeated",
    )


def _add_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with modules of your own that the config names, often `.`; may be repeated",
    )


def _add_config(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    config = parser.add_mutually_exclusive_group(required=True)
    config.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file")
    config.add_argument("--config_path", help="YAML file (RL4LMs' spelling)")
    return config


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser).add_argument(
        "--resume", metavar="PATH", help="go on with a run that ended early: its folder, or one of its checkpoints"
    )
    _add_trust(parser)
    add_run_options(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="let code run that comes with a model, where the config in the run's folder asks for it",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--full", action="store_true", help="print the config too, every default filled in")
    _add_set(parser)
    _add_code(parser)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decoding", choices=("sampling", "greedy", "beam"), help="default: as the model was tuned")
    parser.add_argument("--max_new_tokens", type=_count, help="longest response")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_or_model", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder or a hub id")
    parser.add_argument("--config_path", help="YAML file with data pool and metrics; default: the run's own")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help="(%(default)s)")
    _add_decoding(parser)
    _add_code(parser)
    _add_trust(parser)
    parser.add_argument("--num_beams", type=_count, help="beams of --decoding beam (5)")
    parser.add_argument("--batch_size", type=_count, help="prompts per generation call; default: the config's")
    parser.add_argument("--limit", type=_count, help="only the first so many samples")
    parser.add_argument("--output", type=Path, help="folder for metrics and predictions; default: the run's")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="a run's folder, a model's folder or a hub id")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of --file or standard input")
    parser.add_argument("--file", type=Path, help="prompts, one a line")
    parser.add_argument("--n", type=_count, default=1, help="texts for each prompt (%(default)s)")
    _add_decoding(parser)
    _add_trust(parser)
    parser.add_argument("--temperature", type=float, help="of the sampling")
    parser.add_argument("--top_k", type=int, help="sample from the k likeliest tokens; 0 from all")
    parser.add_argument("--json", action="store_true", help="one JSON object a line: prompt, texts")


def _add_benchmark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", type=Path, help="YAML file; see docs/benchmarking.md")
    parser.add_argument("--processes", type=_count, metavar="N", help="runs side by side; default: the spec's")
    parser.add_argument(
        "--seeds", type=_seeds, metavar="N", help="how many, or a list such as 0,3,7; default: the spec's"
    )
    parser.add_argument("--only", action="append", default=[], metavar="LABEL", help="run this one; may be repeated")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="folder; default: the spec's")
    _add_code(parser)
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what is there")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    what = "a benchmark's run, RESULTS/LABEL, or RESULTS for all its runs"
    parser.add_argument("a", metavar="A", type=Path, help=what)
    parser.add_argument("b", metavar="B", type=Path, help=what)
    parser.add_argument("--metric", action="append", default=[], metavar="KEY", help="default: all; may be repeated")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help="(%(default)s)")


def _seeds(text: str) -> int | list[int]:
    if "," in text and not all(seed.isdecimal() for seed in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected whole numbers as in 0,3,7, got {text!r}")
    return [int(seed) for seed in text.split(",")] if "," in text else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
