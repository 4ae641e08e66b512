"""Command-line interface `rl4lms-like`.

    train CONFIG           check CONFIG          quickstart
    evaluate RUN_OR_MODEL  generate MODEL TEXT   report RUN_FOLDER
    list rewards           show ID
    benchmark SPEC         compare A B           rollouts RUN_FOLDER
    pairs CONFIG           env                   post-train --config FILE

Exit status: 0 success, 1 a run failed (the message gives the reason), 2 errors in the config or the command line,
130 interrupted. Commands import heavy modules when they run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import islice
from pathlib import Path
from typing import Any

from rl4lms_like.cli.options import add_run_options, build_parser
from rl4lms_like.core.disk import is_denied, reason
from rl4lms_like.core.errors import ConfigError, ConfigIssue, RankError, RL4LMsLikeError
from rl4lms_like.core.import_paths import use_code_from
from rl4lms_like.core.ranks import is_main_process
from rl4lms_like.core.secrets import without_secrets
from rl4lms_like.core.wording import accept_any_character, printable
from rl4lms_like.rewards.time_limit import TimeIsUp

PACKAGE = "rl4lms-like"
TIME_TO_REPORT_S = 5.0
"""Time for the main process of several to report an error that all of them have."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "NLTK_DATA", "OMP_NUM_THREADS", "RL4LMS_LIKE_HOME")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # started as a program, so no caller catches errors
        for stream in ("stdout", "stderr"):
            if getattr(sys, stream) is None:  # closed: a file opened later would get its descriptor
                setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the program runs)
            accept_any_character(getattr(sys, stream))
        sys.excepthook = lambda kind, error, place: _say("".join(traceback.format_exception(kind, error, place)))
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "quickstart":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    status = 0
    try:
        use_code_from(*getattr(options, "code", ()))
        with _cancelled_as_by_ctrl_c():
            status = COMMANDS[options.command](options) or 0
        sys.stdout.flush()
        return status
    except RL4LMsLikeError as error:
        if not is_main_process() and isinstance(error, ConfigError | RankError):  # the main process reports it
            time.sleep(TIME_TO_REPORT_S)  # torchrun ends all processes as soon as one has ended
        else:
            _say(traceback.format_exc() if options.traceback else f"{error}\n")
        if argv is None and isinstance(error.__cause__, TimeIsUp):
            _end_despite_threads()
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        if argv is None:
            _end_at_once_by_another()
        if is_main_process():
            _say("interrupted\n")
        return 130
    except BrokenPipeError as error:
        if not _is_stdout_gone():
            return _unexpected(error, options)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (`| head`) has closed the pipe
        return status
    except Exception as error:
        if _is_ours(error):
            raise
        return _unexpected(error, options)


def _say(message: str) -> None:
    """Print a message to standard error, without secrets and terminal control characters.

    If the stream is closed (Ctrl-C also ends `| tee`), output is discarded, so that the exit status is kept.
    """
    try:
        sys.stderr.write(printable(without_secrets(message)))
        sys.stderr.flush()
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)


def _end_at_once_by_another() -> None:
    """Exit at once with status 130 on another signal, because nothing is left to save."""
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: os._exit(130))


def _end_despite_threads() -> None:
    """Exit without waiting for a reward's hanging threads (`ThreadPoolExecutor`), which Python would join."""
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(1)


def _is_ours(error: Exception) -> bool:
    """Return True for a bug of this library, whose traceback is shown in full for a bug report."""
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    return not isinstance(error, OSError | MemoryError) and Path(__file__).parents[1] in Path(place).parents


def _unexpected(error: Exception, options: argparse.Namespace) -> int:
    """Report an unexpected error of another library or the system; return the exit status."""
    text = reason(error) if isinstance(error, OSError) else error
    if is_denied(error) and not options.traceback:
        _say(f"{text}\n")
        return 1
    where = "for a traceback, see log.txt of the run, or use the same command with --traceback"
    _say(traceback.format_exc() if options.traceback else f"{type(error).__name__}: {text}\n{where}\n")
    return 1


def _is_stdout_gone() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    with suppress(io.UnsupportedOperation, AttributeError):  # Windows has no `poll`
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # mask 0 reports errors only; needed for unbuffered output
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


@contextmanager
def _cancelled_as_by_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM, sent to cancelled jobs, like Ctrl-C within the context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


# --- commands -------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> None:
    if options.resume is not None:
        from rl4lms_like.training.run import resume

        _refuse_another_place(options)
        if options.replay is not None:
            text = "a run resumes with the rollouts that it began with; remove the option"
            raise ConfigError([ConfigIssue("--replay", text)], "the command line")
        resume(options.resume, **_given(options, "overrides entity_name log_to_wandb trust_remote_code"))
        return
    if options.trust_remote_code:
        text = "it can be used only with --resume; in a config, set trust_remote_code next to the model's name"
        raise ConfigError([ConfigIssue("--trust_remote_code", text)], "the command line")
    from rl4lms_like.training.run import train

    names = "project_name experiment_name entity_name base_path_to_store_results log_to_wandb overrides replay new"
    train(options.config or options.config_path, **_given(options, names))


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
        text = "a run resumes in its own folder; remove the option, or copy the folder and resume the copy"
        raise ConfigError([ConfigIssue(f"--{name}", text) for name in given], "the command line")


def _check(options: argparse.Namespace) -> None:
    from rl4lms_like.training.config.run_config import load_config

    if options.remote and not options.reward:
        raise ConfigError([ConfigIssue("--remote", "it can be used only with --reward")], "the command line")
    config = load_config(options.config or options.config_path, options.overrides)
    from rl4lms_like.training.preview import preview, reward_audit  # loads torch

    for part in preview(config, full=options.full):
        print(printable(without_secrets(part)), flush=True)
    if options.reward:
        for part in reward_audit(config, remote=options.remote):
            print(printable(without_secrets(part)), flush=True)


def _evaluate(options: argparse.Namespace) -> None:
    from rl4lms_like.training.inference import evaluate_run

    names = "split config_path output decoding num_beams max_new_tokens batch_size limit seed trust_remote_code"
    evaluate_run(options.run_or_model, **_given(options, names), **_engine(options))


def _generate(options: argparse.Namespace) -> None:
    prompts = _prompts(options)
    from rl4lms_like.training.inference import generate_texts  # loads torch

    names = "n max_new_tokens decoding temperature top_k seed trust_remote_code"
    texts = generate_texts(options.model, prompts, **_given(options, names), **_engine(options))
    for prompt, responses in zip(prompts, texts, strict=True):
        if options.json:
            _print_json({"prompt": prompt, "texts": responses})
        else:
            print(*(printable(f"{prompt} | {response}") for response in responses), sep="\n")


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the argument `engine`, if it is given."""
    from rl4lms_like.training.config.yaml_file import parse_value

    try:
        return {"engine": parse_value(options.engine)} if options.engine is not None else {}
    except ValueError as error:
        raise ConfigError([ConfigIssue("", str(error))], "--engine") from error


def _print_json(line: Mapping[str, Any]) -> None:
    escaped = sys.stdout.isatty() or not str(sys.stdout.encoding).lower().startswith("utf")
    print(json.dumps(line, ensure_ascii=escaped))


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


def _list(options: argparse.Namespace) -> None:
    from rl4lms_like.training.catalogue import listing

    print(listing(options.kind))


def _show(options: argparse.Namespace) -> None:
    from rl4lms_like.training.catalogue import description

    print(description(options.id))


def _quickstart(options: argparse.Namespace) -> int | None:
    from rl4lms_like.training.quickstart import main as quickstart

    return quickstart(options.rest)


def _report(options: argparse.Namespace) -> None:
    from rl4lms_like.tracking.report import write_report

    print(write_report(options.run_folder))


def _rollouts(options: argparse.Namespace) -> None:
    from rl4lms_like.tracking.rollouts import described, episodes_of

    episodes = episodes_of(options.run_folder, **_given(options, "iteration min_reward max_reward contains"))
    episode = None
    for episode in islice(episodes, options.limit):
        if options.json:
            _print_json(episode)
        else:
            print(described(episode))
    if episode is None:
        _say("no episode meets these conditions\n")


def _pretrain_critic(options: argparse.Namespace) -> None:
    from rl4lms_like.training.run import pretrain_critic

    config_path = options.config or options.config_path
    for line in pretrain_critic(config_path, options.output, overrides=options.overrides):
        print(line, flush=True)


def _pairs(options: argparse.Namespace) -> None:
    from rl4lms_like.training.config.run_config import load_config

    config = load_config(options.config or options.config_path, options.overrides)
    from rl4lms_like.training.sampled_pairs import write_pairs

    names = "n_samples split max_prompts min_difference"
    write_pairs(config, options.out, **_given(options, names), report=partial(print, flush=True))


def _post_train(options: argparse.Namespace) -> int:
    from rl4lms_like.training.post_train import post_train

    def say(text: str) -> None:
        if is_main_process():
            print(printable(without_secrets(text)), flush=True)

    names = "overrides model_index output_dir resume dry_run"
    return post_train(options.config, **_given(options, names), with_traceback=options.traceback, say=say)


def _env(options: argparse.Namespace) -> None:
    """Print versions, devices and settings. Packages that are not installed are named with their extra."""
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts = {
        PACKAGE: version(PACKAGE),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "CPU threads of torch": f"{torch.get_num_threads()} of {os.cpu_count()}",
        "GPUs": ", ".join(devices) or "none",
    }
    facts |= {f"${name}": os.environ[name] for name in VARIABLES if name in os.environ}
    for name, value in (facts | dict(_packages())).items():
        print(f"{name}: {value}")


def _packages() -> Iterator[tuple[str, str]]:
    """Yield the dependencies of the library, including those of its extras, each with its version, once."""
    from packaging.requirements import Requirement

    seen = {PACKAGE}
    for requirement in map(Requirement, requires(PACKAGE) or ()):
        extra = str(requirement.marker or "").partition('extra == "')[2].rstrip('"')
        if requirement.name in seen or extra in ("dev", "docs", "all"):
            continue
        seen.add(requirement.name)
        try:
            yield requirement.name, version(requirement.name)
        except PackageNotFoundError:
            yield requirement.name, f"not installed (extra {extra!r})" if extra else "not installed"


def _benchmark(options: argparse.Namespace) -> int:
    from rl4lms_like.benchmarking.runner import benchmark

    return benchmark(options.spec, **_given(options, "processes seeds only results report_only ray"))


def _compare(options: argparse.Namespace) -> None:
    from rl4lms_like.benchmarking.results import compare

    print(compare(options.a, options.b, metrics=options.metric, split=options.split))


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "train": _train,
    "check": _check,
    "post-train": _post_train,
    "evaluate": _evaluate,
    "generate": _generate,
    "list": _list,
    "show": _show,
    "quickstart": _quickstart,
    "report": _report,
    "rollouts": _rollouts,
    "benchmark": _benchmark,
    "env": _env,
    "pretrain-critic": _pretrain_critic,
    "pairs": _pairs,
    "compare": _compare,
}
"""Name -> function of the parsed options; returns the exit status, or None for success."""
