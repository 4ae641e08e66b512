"""Implementation of the commands. Each command imports heavy modules when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rl4lms_like.cli.options import add_run_options
from rl4lms_like.core.errors import ConfigError, Mistake, RL4LMsLikeError
from rl4lms_like.core.secrets import without_secrets
from rl4lms_like.core.wording import printable


def _train(options: argparse.Namespace) -> int:
    if options.resume is not None:
        from rl4lms_like.training.run import resume

        _refuse_another_place(options)
        resume(options.resume, **_given(options, "overrides entity_name log_to_wandb trust_remote_code"))
        return 0
    if options.trust_remote_code:
        said = "it can be used only with --resume; in a config, set trust_remote_code next to the model's name"
        raise ConfigError([Mistake("--trust_remote_code", said)], "the command line")
    from rl4lms_like.training.run import train

    names = "project_name experiment_name entity_name base_path_to_store_results log_to_wandb overrides new"
    train(options.config or options.config_path, **_given(options, names))
    return 0


def _given(options: argparse.Namespace, names: str) -> dict[str, Any]:
    """Return the options with these names as keyword arguments."""
    return {name: getattr(options, name) for name in names.split()}


def _refuse_another_place(options: argparse.Namespace) -> None:
    """Raise if options that name another folder are given with --resume, because they would be ignored."""
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    places = ("project_name", "experiment_name", "base_path_to_store_results")
    given = [name for name in (*places, "new") if getattr(options, name) != parser.get_default(name)]
    if given:
        said = "a run resumes in its own folder; remove the option, or copy the folder and resume the copy"
        raise ConfigError([Mistake(f"--{name}", said) for name in given], "the command line")


def _check(options: argparse.Namespace) -> int:
    from rl4lms_like.training.config.run_config import load_config
    from rl4lms_like.training.preview import preview

    config = load_config(options.config or options.config_path, options.overrides)
    for part in preview(config, full=options.full):
        print(printable(without_secrets(part)), flush=True)
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from rl4lms_like.training.inference import evaluate_run

    names = "split config_path output decoding num_beams max_new_tokens batch_size limit seed trust_remote_code"
    evaluate_run(options.run_or_model, **_given(options, names))
    return 0


def _generate(options: argparse.Namespace) -> int:
    from rl4lms_like.training.inference import generate_texts

    prompts = _prompts(options)
    names = "n max_new_tokens decoding temperature top_k seed trust_remote_code"
    texts = generate_texts(options.model, prompts, **_given(options, names))
    for prompt, responses in zip(prompts, texts, strict=True):
        if options.json:
            escaped = sys.stdout.isatty() or not str(sys.stdout.encoding).lower().startswith("utf")
            print(json.dumps({"prompt": prompt, "texts": responses}, ensure_ascii=escaped))
        else:
            print(*(printable(f"{prompt} | {response}") for response in responses), sep="\n")
    return 0


def _prompts(options: argparse.Namespace) -> list[str]:
    place = "the command line" if options.prompts else options.file or "standard input"
    try:
        if options.prompts:
            found = list(options.prompts)
        elif options.file is not None:
            found = options.file.read_text(encoding="utf-8").splitlines()
        elif sys.stdin is None:
            raise RL4LMsLikeError("no prompts: give them as arguments or with --file, since standard input is closed")
        else:
            found = sys.stdin.read().splitlines()
        "".join(found).encode()  # raises for undecodable bytes (lone surrogates), which tokenizers reject
    except OSError as error:
        raise RL4LMsLikeError(f"cannot read the prompts in {place}: {error.strerror}") from error
    except UnicodeError as error:
        encoding = "UTF-8" if options.file is not None else sys.getfilesystemencoding()
        raise RL4LMsLikeError(f"the prompts in {place} are not text in {encoding}") from error
    return [line for line in found if line]


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
    from rl4lms_like.benchmarking.runner import benchmark

    return benchmark(options.spec, **_given(options, "processes seeds only results report_only"))


def _compare(options: argparse.Namespace) -> int:
    from rl4lms_like.benchmarking.results import compare

    print(compare(options.a, options.b, metrics=options.metric, split=options.split))
    return 0


COMMANDS = {
    "train": _train,
    "check": _check,
    "evaluate": _evaluate,
    "generate": _generate,
    "list": _list,
    "show": _show,
    "quickstart": _quickstart,
    "report": _report,
    "benchmark": _benchmark,
    "compare": _compare,
}
"""Name -> function of the parsed options that returns the exit status."""
