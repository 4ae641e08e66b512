"""Options of all commands."""

from __future__ import annotations

import argparse
from pathlib import Path

EXIT_STATUS = (
    "Exit status: 0 success, 1 a run failed for the reason that is printed, "
    "2 errors in the config or the command line, 130 interrupted."
)
KINDS = (
    *("data_pools", "samplers", "rewards", "metrics", "post_processors"),
    *("policies", "engines", "algorithms", "objectives"),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rl4lms-like", description="Reinforcement learning for language models.", epilog=EXIT_STATUS
    )
    parser.set_defaults(code=[])  # of commands that name no code

    # In the order of `rl4lms-like --help`: from the common commands to the rare ones.
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_train(_command(commands, "train", "train a model with a YAML config"))
    _add_check(_command(commands, "check", "check a YAML config, and show a summary"))
    _add_post_train(_command(commands, "post-train", "train the models of a pipeline file on preferences"))
    _add_evaluate(_command(commands, "evaluate", "evaluate a run's model, or any model, on a split"))
    _add_generate(_command(commands, "generate", "generate texts with a trained model"))

    command = _command(commands, "list", "list components, one line per id")
    command.add_argument("kind", choices=KINDS)
    command = _command(commands, "show", "show the description and arguments of a component")
    command.add_argument("id", metavar="ID", help="an id, or an import path package.module:Name")
    _add_code(command)

    # Without a help of its own: `quickstart --help` is answered by the script's parser.
    _command(commands, "quickstart", "train the embedded default config; has its own options", has_help=False)

    command = _command(commands, "report", "write report.html of a run")
    command.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    _add_rollouts(_command(commands, "rollouts", "print the kept episodes of a run"))
    _add_benchmark(_command(commands, "benchmark", "run several configs with several seeds, and write a report"))
    _add_compare(_command(commands, "compare", "test which of two runs of a benchmark is better"))
    _add_pairs(_command(commands, "pairs", "sample responses of a config's policy, and write the best and worst ones"))

    command = _command(commands, "pretrain-critic", "train only the critic of a config, and save it")
    _add_config(command)
    command.add_argument("--output", type=Path, default=Path("critic"), help="folder of the critic (%(default)s)")
    _add_set(command)
    _add_code(command)
    _command(commands, "env", "print the versions and settings that a bug report needs")
    return parser


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add RL4LMs' flags, for `train` and for `scripts/training/train_text_generation.py`."""
    parser.add_argument("--project_name", default="rl4lm_exps", help="second part of the run path (%(default)s)")
    parser.add_argument("--experiment_name", default="rl4lm_experiment", help="last part of the run path (%(default)s)")
    parser.add_argument("--entity_name", help="account or team in Weights & Biases")
    parser.add_argument("--base_path_to_store_results", default=".", help="first part of the run path (.)")
    parser.add_argument("--log_to_wandb", action="store_true", help="log to Weights & Biases")
    parser.add_argument("--new", action="store_true", help="start a new run even if one of this config can be resumed")
    _add_set(parser)
    _add_code(parser)


def _command(
    commands: argparse._SubParsersAction, name: str, summary: str, *, has_help: bool = True
) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, add_help=has_help
    )
    command.add_argument("--traceback", action="store_true", help="print the traceback of an error")
    return command


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="override a config value, e.g. alg.args.learning_rate=1e-5; may be repeated",
    )


def _add_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with your own modules that the config names, often `.`; may be repeated",
    )


def _add_config(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    config = parser.add_mutually_exclusive_group(required=True)
    config.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file")
    config.add_argument("--config_path", help="YAML file (RL4LMs' spelling)")
    return config


def _add_train(parser: argparse.ArgumentParser) -> None:
    # In the group of the config: a run resumes with the config in its folder.
    _add_config(parser).add_argument(
        "--resume", metavar="PATH", help="resume a run that ended early: its folder, or one of its checkpoints"
    )

    parser.add_argument(
        "--replay",
        metavar="RUN[:N-M]",
        help="train on the kept rollouts of this run folder, of all iterations or some (RUN:5, RUN:3-7)",
    )
    _add_trust(parser)
    add_run_options(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run code that is part of a model, if the config in the run's folder requires it",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--full", action="store_true", help="also print the config with all defaults")
    parser.add_argument("--reward", action="store_true", help="also audit the reward: call it with texts to exploit it")
    parser.add_argument("--remote", action="store_true", help="with --reward: also call a reward on a server")
    _add_set(parser)
    _add_code(parser)


def _add_post_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file; see docs/preferences.md")
    parser.add_argument("--model-index", type=int, metavar="N", help="train only the model with this index, from 0")
    parser.add_argument("--output-dir", metavar="FOLDER", help="folder of the results; default: training.output_dir")
    parser.add_argument("--resume", action="store_true", help="skip finished models, resume one that ended early")
    parser.add_argument("--dry-run", action="store_true", help="print the output of `check` for each model")
    _add_set(parser)


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decoding", choices=("sampling", "greedy", "beam"), help="default: as in training")
    parser.add_argument("--max_new_tokens", type=_count, help="maximum length of a response")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (%(default)s)")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_or_model", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder or a hub id")
    parser.add_argument("--config_path", help="YAML file with data pool and metrics; default: the run's own")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help="(%(default)s)")
    _add_decoding(parser)
    _add_code(parser)
    _add_trust(parser)
    parser.add_argument("--num_beams", type=_count, help="number of beams for --decoding beam (5)")
    parser.add_argument("--batch_size", type=_count, help="prompts per generation call; default: the config's")
    parser.add_argument("--limit", type=_count, help="use only the first N samples")
    parser.add_argument("--output", type=Path, help="folder for metrics and predictions; default: the run's")
    _add_engine(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="a run's folder, a model's folder or a hub id")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: the lines of --file or standard input")
    parser.add_argument("--file", type=Path, help="prompts, one per line")
    parser.add_argument("--n", type=_count, default=1, help="texts per prompt (%(default)s)")

    _add_decoding(parser)
    _add_code(parser)
    _add_trust(parser)
    parser.add_argument("--temperature", type=float, help="sampling temperature")
    parser.add_argument("--top_k", type=int, help="sample from the k most probable tokens; 0 means all tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line: prompt, texts")
    _add_engine(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    example = "{id: vllm, args: {url: URL, weights_dir: FOLDER}}"
    parser.add_argument(
        "--engine", metavar="ENGINE", help=f"generate with an external engine, as in a config: {example}"
    )


def _add_pairs(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--out", type=Path, default=Path("pairs.jsonl"), help="JSONL file of the pairs (%(default)s)")
    parser.add_argument("-n", "--n_samples", type=_count, default=4, help="responses per prompt (%(default)s)")
    parser.add_argument("--split", choices=("train", "val", "test"), default="train", help="(%(default)s)")
    parser.add_argument("--max_prompts", type=_count, help="use only the first N prompts")
    parser.add_argument(
        "--min_difference", type=float, default=0.0, help="minimum difference of the scores of a pair (%(default)s)"
    )
    _add_set(parser)
    _add_code(parser)


def _add_rollouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("--iteration", type=_count, metavar="N", help="only of this iteration")
    parser.add_argument("--min_reward", type=float, metavar="R", help="only episodes with at least this task reward")
    parser.add_argument("--max_reward", type=float, metavar="R", help="only episodes with at most this task reward")
    parser.add_argument("--contains", metavar="TEXT", help="only episodes with this text in prompt or response")
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N of them")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def _add_benchmark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", type=Path, help="YAML file; see docs/benchmarking.md")
    parser.add_argument("--processes", type=_count, metavar="N", help="number of parallel runs; default: the spec's")
    parser.add_argument(
        "--seeds", type=_seeds, metavar="N", help="number of seeds, or a list such as 0,3,7; default: the spec's"
    )
    parser.add_argument("--only", action="append", default=[], metavar="LABEL", help="only this run; may be repeated")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="folder of the results; default: the spec's")
    _add_code(parser)
    parser.add_argument("--report-only", action="store_true", help="run nothing, report existing results")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="run on this Ray cluster: auto, HOST:PORT, or local for a new one"
    )


def _add_compare(parser: argparse.ArgumentParser) -> None:
    help_text = "a benchmark's run, RESULTS/LABEL, or RESULTS for all its runs"
    parser.add_argument("a", metavar="A", type=Path, help=help_text)
    parser.add_argument("b", metavar="B", type=Path, help=help_text)
    parser.add_argument("--metric", action="append", default=[], metavar="KEY", help="default: all; may be repeated")
    parser.add_argument("--split", choices=("train", "val", "test"), default="test", help="(%(default)s)")


def _seeds(value: str) -> int | list[int]:
    """Parse the number of seeds, or the seeds themselves, separated by commas."""
    if "," not in value:
        return _count(value)
    seeds = value.split(",")
    if not all(seed.isdecimal() for seed in seeds):
        raise argparse.ArgumentTypeError(f"expected whole numbers as in 0,3,7, got {value!r}")
    return [int(seed) for seed in seeds]


def _count(value: str) -> int:
    # `isdecimal` also excludes what `int` accepts: ` 1`, `1_000`, `+1`.
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {value!r}")
    return int(value)
