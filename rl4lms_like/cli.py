"""`rl4lms-like`: what people type.

    train CONFIG           check CONFIG          quickstart
    evaluate RUN_OR_MODEL  generate MODEL TEXT   report RUN_FOLDER
    list rewards           show ID
    benchmark SPEC         compare A B

Exit status: 0 done, 1 a run failed for a reason that the message names, 2 mistakes in the config or the command line,
130 interrupted. Everything heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rl4lms_like.core.disk import reason
from rl4lms_like.core.errors import ConfigError, Mistake, RL4LMsLikeError
from rl4lms_like.core.import_paths import use_code_from
from rl4lms_like.core.secrets import without_secrets
from rl4lms_like.core.wording import printable

EXIT_STATUS = (
    "Exit status: 0 done, 1 a run failed for the reason that is printed, "
    "2 mistakes in the config or the command line, 130 interrupted."
)
KINDS = ("data_pools", "rewards", "metrics", "post_processors", "policies", "algorithms")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # a program of its own, whose errors nobody catches
        sys.excepthook = lambda kind, error, place: _say("".join(traceback.format_exception(kind, error, place)))
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.run is not _quickstart:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        use_code_from(*getattr(options, "code", ()))
        with _cancelled_as_by_ctrl_c():
            return int(options.run(options))
    except RL4LMsLikeError as error:
        _say(traceback.format_exc() if options.traceback else f"{error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError as error:
        if not _is_stdout_gone():
            return _unexpected(error, options)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (`| head`) has seen enough
        return 0
    except Exception as error:
        if _is_ours(error):
            raise
        return _unexpected(error, options)


def _say(message: str) -> None:
    """Prints what went wrong, without secrets, and without what would steer the terminal."""
    sys.stderr.write(printable(without_secrets(message)))


def _is_ours(error: Exception) -> bool:
    """Whether it is a mistake of this library, which is shown in full: whoever reports it has all of it."""
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    return not isinstance(error, OSError | MemoryError) and Path(__file__).parent in Path(place).parents


def _unexpected(error: Exception, options: argparse.Namespace) -> int:
    """Says what a library or the system raised, and nobody has said by name."""
    said = reason(error) if isinstance(error, OSError) else error
    where = "where it came from: the log.txt of its run, or the same command with --traceback"
    _say(traceback.format_exc() if options.traceback else f"{type(error).__name__}: {said}\n{where}\n")
    return 1


def _is_stdout_gone() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="rl4lms-like", description="Reinforcement learning for language models.", epilog=EXIT_STATUS
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(_command(commands, "train", "train a model as a YAML file says", _train))
    _add_check(_command(commands, "check", "check a YAML file, and show what it amounts to", _check))
    _add_evaluate(_command(commands, "evaluate", "measure a run's model, or any model, on a split", _evaluate))
    _add_generate(_command(commands, "generate", "write texts with a tuned model", _generate))
    command = _command(commands, "list", "list components, one line an id", _list)
    command.add_argument("kind", choices=KINDS)
    command = _command(commands, "show", "show what a component is and takes", _show)
    command.add_argument("id", metavar="ID", help="an id, or an import path package.module:Name")
    _add_code(command)
    _command(commands, "quickstart", "train the embedded default; takes options of its own", _quickstart, own_help=True)
    command = _command(commands, "report", "write report.html of a run", _report)
    command.add_argument("run_folder", metavar="RUN_FOLDER", type=Path)
    _add_benchmark(_command(commands, "benchmark", "run many configs with many seeds, and report", _benchmark))
    _add_compare(_command(commands, "compare", "say which of two runs of a benchmark is better", _compare))
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
    commands: argparse._SubParsersAction, name: str, summary: str, run: object, *, own_help: bool = False
) -> argparse.ArgumentParser:
    description = summary[0].upper() + summary[1:] + "."
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, add_help=not own_help
    )
    command.add_argument("--traceback", action="store_true", help="show where an error came from")
    command.set_defaults(run=run)
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
    add_run_options(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
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


def _train(options: argparse.Namespace) -> int:
    if options.resume is not None:
        from rl4lms_like.training.run import resume

        _refuse_another_place(options)
        resume(
            options.resume,
            overrides=options.overrides,
            entity_name=options.entity_name,
            log_to_wandb=options.log_to_wandb,
        )
        return 0
    from rl4lms_like.training.run import train

    train(
        options.config or options.config_path,
        project_name=options.project_name,
        experiment_name=options.experiment_name,
        entity_name=options.entity_name,
        base_path_to_store_results=options.base_path_to_store_results,
        log_to_wandb=options.log_to_wandb,
        overrides=options.overrides,
        new=options.new,
    )
    return 0


def _refuse_another_place(options: argparse.Namespace) -> None:
    """A run goes on in its own folder; what would name another one is not passed over in silence."""
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    places = ("project_name", "experiment_name", "base_path_to_store_results")
    given = [name for name in (*places, "new") if getattr(options, name) != parser.get_default(name)]
    if given:
        said = "a run goes on in its own folder; leave it out, or copy the folder and resume the copy"
        raise ConfigError([Mistake(f"--{name}", said) for name in given], "the command line")


@contextmanager
def _cancelled_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, which ends a job that is cancelled, does what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _check(options: argparse.Namespace) -> int:
    from rl4lms_like.training.config.run_config import load_config
    from rl4lms_like.training.preview import preview

    for part in preview(load_config(options.config or options.config_path, options.overrides)):
        print(part, flush=True)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from rl4lms_like.training.inference import evaluate_run

    evaluate_run(
        options.run_or_model,
        split=options.split,
        config_path=options.config_path,
        output=options.output,
        decoding=options.decoding,
        num_beams=options.num_beams,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        limit=options.limit,
        seed=options.seed,
    )
    return 0


def _generate(options: argparse.Namespace) -> int:
    from rl4lms_like.training.inference import generate_texts

    prompts = _prompts(options)
    texts = generate_texts(
        options.model,
        prompts,
        n=options.n,
        max_new_tokens=options.max_new_tokens,
        decoding=options.decoding,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    for prompt, responses in zip(prompts, texts, strict=True):
        if options.json:
            print(json.dumps({"prompt": prompt, "texts": responses}, ensure_ascii=sys.stdout.isatty()))
        else:
            print(*(printable(f"{prompt} | {response}") for response in responses), sep="\n")
    return 0


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.prompts:
        return list(options.prompts)
    if options.file is None:
        return [line for line in sys.stdin.read().splitlines() if line]
    try:
        return [line for line in options.file.read_text(encoding="utf-8").splitlines() if line]
    except OSError as error:
        raise RL4LMsLikeError(f"cannot read the prompts in {options.file}: {error.strerror}") from error


def _list(options: argparse.Namespace) -> int:
    from rl4lms_like.training.catalogue import listing

    print(listing(options.kind))
    return 0


def _show(options: argparse.Namespace) -> int:
    from rl4lms_like.training.catalogue import description

    print(description(options.id))
    return 0


def _quickstart(options: argparse.Namespace) -> int:
    from rl4lms_like.training.quickstart import main as quickstart

    return int(quickstart(options.rest) or 0)


def _report(options: argparse.Namespace) -> int:
    from rl4lms_like.tracking.report import write_report

    print(write_report(options.run_folder))
    return 0


def _benchmark(options: argparse.Namespace) -> int:
    from rl4lms_like.benchmarking.main import benchmark

    return benchmark(
        options.spec,
        processes=options.processes,
        seeds=options.seeds,
        only=options.only,
        results=options.results,
        report_only=options.report_only,
    )


def _compare(options: argparse.Namespace) -> int:
    from rl4lms_like.benchmarking.comparison import compare

    print(compare(options.a, options.b, metrics=options.metric, split=options.split))
    return 0
