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
from rl4lms_like.rewards.time_limit import TimeIsUp
from rl4lms_like.system.disk import is_denied, reason
from rl4lms_like.system.errors import ConfigError, ConfigIssue, RankError, RL4LMsLikeError
from rl4lms_like.system.import_paths import use_code_from
from rl4lms_like.system.ranks import is_main_process
from rl4lms_like.system.secrets import without_secrets
from rl4lms_like.system.wording import accept_any_character, printable

PACKAGE = "rl4lms-like"
TIME_TO_REPORT_S = 5.0
"""Time for the main process of several to report an error that all of them have."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "NLTK_DATA", "OMP_NUM_THREADS", "RL4LMS_LIKE_HOME")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    # Called from Python, only the command runs: streams, signals and threads are the caller's.
    is_program = argv is None
    if is_program:
        _prepare_streams()

    parser = build_parser()
    options, unknown = parser.parse_known_args(None if argv is None else list(argv))
    if unknown and options.command != "quickstart":  # which has a parser of its own
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.unknown = unknown

    status = 0
    try:
        use_code_from(*options.code)
        with _cancelled_as_by_ctrl_c():
            status = COMMANDS[options.command](options) or 0
        sys.stdout.flush()
        return status

    # Errors that are meant for users: their message is enough.
    except RL4LMsLikeError as error:
        _report_error(error, options)
        if is_program and isinstance(error.__cause__, TimeIsUp):
            _end_despite_threads()
        return 2 if isinstance(error, ConfigError) else 1

    # The run has saved its state before the interrupt arrives here; 130 is what shells expect (128 + SIGINT).
    except KeyboardInterrupt:
        if is_program:
            _end_at_once_by_another()
        if is_main_process():
            _say("interrupted\n")
        return 130

    # The reader of standard output (`| head`) has closed the pipe, which is no error. Python would report one when it
    # flushes the stream at its exit, so the stream is redirected.
    except BrokenPipeError as error:
        if not _is_stdout_gone():
            return _unexpected(error, options)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status

    except Exception as error:
        if _is_ours(error):
            raise
        return _unexpected(error, options)


def _prepare_streams() -> None:
    """Prepare standard output and error of a program, in which no caller catches errors."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: a file opened later would get its descriptor
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for as long as the program runs)
        accept_any_character(getattr(sys, name))

    # The traceback of a bug may hold secrets, too.
    sys.excepthook = lambda kind, error, trace: _say("".join(traceback.format_exception(kind, error, trace)))


def _report_error(error: RL4LMsLikeError, options: argparse.Namespace) -> None:
    # These errors occur in all of several processes. Only the main one reports them; the others wait for it, because
    # torchrun ends all processes as soon as one has ended.
    if not is_main_process() and isinstance(error, ConfigError | RankError):
        time.sleep(TIME_TO_REPORT_S)
    else:
        _say(traceback.format_exc() if options.traceback else f"{error}\n")


def _say(message: str) -> None:
    """Print a message to standard error, without secrets and terminal control characters.

    If the stream is closed (Ctrl-C also ends `| tee`), output is discarded, so that the exit status is kept.
    """
    try:
        sys.stderr.write(printable(without_secrets(message)))
        sys.stderr.flush()
        sys.stdout.flush()
    except OSError:
        # Also what is left in the buffers: Python's failure to flush them at its exit would be status 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)


def _end_at_once_by_another() -> None:
    """Exit at once with status 130 on another signal, because nothing is left to save."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, lambda number, frame: os._exit(130))


def _end_despite_threads() -> None:
    """Exit without waiting for a reward's hanging threads (`ThreadPoolExecutor`), which Python would join."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if all(thread.daemon for thread in threads):
        return

    # `os._exit` skips what Python does at its exit, such as writing the streams' buffers.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(1)


def _is_ours(error: Exception) -> bool:
    """Return True for a bug of this library, whose traceback is shown in full for a bug report."""
    # Where it was raised. Errors of files and memory are the system's, wherever in the library they occur.
    if isinstance(error, OSError | MemoryError):
        return False
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return Path(__file__).parents[1] in file.parents


def _unexpected(error: Exception, options: argparse.Namespace) -> int:
    """Report an unexpected error of another library or the system; return the exit status."""
    message = reason(error) if isinstance(error, OSError) else error
    hint = "for a traceback, see log.txt of the run, or use the same command with --traceback"
    if options.traceback:
        _say(traceback.format_exc())
    elif is_denied(error):  # the message says what to do; a traceback would not help
        _say(f"{message}\n")
    else:
        _say(f"{type(error).__name__}: {message}\n{hint}\n")
    return 1


def _is_stdout_gone() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True

    # Unbuffered output leaves nothing to flush. A mask of 0 asks for errors only; Windows has no `poll`.
    with suppress(io.UnsupportedOperation, AttributeError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


@contextmanager
def _cancelled_as_by_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM, sent to cancelled jobs, like Ctrl-C within the context."""
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in that thread only
        yield
        return

    # None: the handler before was not installed from Python, which cannot restore it.
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


# --- commands -------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace) -> None:
    if options.resume is not None:
        from rl4lms_like.run import resume

        _refuse_another_folder(options)
        if options.replay is not None:
            message = "a run resumes with the rollouts that it began with; remove the option"
            raise ConfigError([ConfigIssue("--replay", message)], "the command line")
        resume(options.resume, **_arguments(options, "overrides entity_name log_to_wandb trust_remote_code"))
        return

    # The option permits what the config in a run's folder asks for, which may come from another user. A file that the
    # user names needs no second permission.
    if options.trust_remote_code:
        message = "it can be used only with --resume; in a config, set trust_remote_code next to the model's name"
        raise ConfigError([ConfigIssue("--trust_remote_code", message)], "the command line")
    from rl4lms_like.run import train

    names = "project_name experiment_name entity_name base_path_to_store_results log_to_wandb overrides replay new"
    train(options.config or options.config_path, **_arguments(options, names))


def _arguments(options: argparse.Namespace, names: str) -> dict[str, Any]:
    """Return the options with these names as keyword arguments."""
    return {name: getattr(options, name) for name in names.split()}


def _refuse_another_folder(options: argparse.Namespace) -> None:
    """Raise if options that name another folder are given with --resume, because they would be ignored."""
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    names = ("project_name", "experiment_name", "base_path_to_store_results", "new")
    used = [name for name in names if getattr(options, name) != parser.get_default(name)]
    if used:
        message = "a run resumes in its own folder; remove the option, or copy the folder and resume the copy"
        raise ConfigError([ConfigIssue(f"--{name}", message) for name in used], "the command line")


def _check(options: argparse.Namespace) -> None:
    from rl4lms_like.config.run_config import load_config

    if options.remote and not options.reward:
        raise ConfigError([ConfigIssue("--remote", "it can be used only with --reward")], "the command line")
    config = load_config(options.config or options.config_path, options.overrides)

    # After the config, whose errors are shown without the seconds that this import takes: it loads torch.
    from rl4lms_like.preview import preview, reward_audit

    # Each section as soon as it is ready: the audit calls the reward, which may take long.
    for section in preview(config, full=options.full):
        print(printable(without_secrets(section)), flush=True)
    if options.reward:
        for section in reward_audit(config, remote=options.remote):
            print(printable(without_secrets(section)), flush=True)


def _evaluate(options: argparse.Namespace) -> None:
    from rl4lms_like.inference import evaluate_run

    names = "split config_path output decoding num_beams max_new_tokens batch_size limit seed trust_remote_code"
    evaluate_run(options.run_or_model, **_arguments(options, names), **_engine(options))


def _generate(options: argparse.Namespace) -> None:
    # Before the import, which loads torch: a file that cannot be read is reported immediately.
    prompts = _prompts(options)
    from rl4lms_like.inference import generate_texts

    names = "n max_new_tokens decoding temperature top_k seed trust_remote_code"
    texts = generate_texts(options.model, prompts, **_arguments(options, names), **_engine(options))
    for prompt, responses in zip(prompts, texts, strict=True):
        if options.json:
            _print_json({"prompt": prompt, "texts": responses})
        else:
            print(*(printable(f"{prompt} | {response}") for response in responses), sep="\n")


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the argument `engine`, if it is given."""
    from rl4lms_like.config.yaml_file import parse_value

    if options.engine is None:
        return {}
    try:
        return {"engine": parse_value(options.engine)}
    except ValueError as error:
        raise ConfigError([ConfigIssue("", str(error))], "--engine") from error


def _print_json(line: Mapping[str, Any]) -> None:
    # JSON itself escapes only the control characters of ASCII, not those that change a terminal's direction of writing.
    # Other encodings than UTF lack most characters.
    is_escaped = sys.stdout.isatty() or not str(sys.stdout.encoding).lower().startswith("utf")
    print(json.dumps(line, ensure_ascii=is_escaped))


def _prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts in the command line, else the lines of a file, else those of standard input."""
    source = "the command line" if options.prompts else options.file or "standard input"
    try:
        if options.prompts:
            prompts = list(options.prompts)
        elif options.file is not None:
            prompts = options.file.read_text(encoding="utf-8").splitlines()
        elif sys.stdin is None:
            raise RL4LMsLikeError("no prompts: give them as arguments or with --file, since standard input is closed")
        else:
            prompts = sys.stdin.read().splitlines()

        # Python reads undecodable bytes of the command line as lone surrogates, which tokenizers reject.
        "".join(prompts).encode()
    except OSError as error:
        raise RL4LMsLikeError(f"cannot read the prompts in {source}: {error.strerror}") from error
    except UnicodeError as error:
        encoding = "UTF-8" if options.file is not None else sys.getfilesystemencoding()
        raise RL4LMsLikeError(f"the prompts in {source} are not text in {encoding}") from error
    return [prompt for prompt in prompts if prompt]


def _list(options: argparse.Namespace) -> None:
    from rl4lms_like.catalogue import listing

    print(listing(options.kind))


def _show(options: argparse.Namespace) -> None:
    from rl4lms_like.catalogue import description

    print(description(options.id))


def _quickstart(options: argparse.Namespace) -> int | None:
    from rl4lms_like.quickstart import main as quickstart

    return quickstart(options.unknown)


def _report(options: argparse.Namespace) -> None:
    from rl4lms_like.tracking.report import write_report

    print(write_report(options.run_folder))


def _rollouts(options: argparse.Namespace) -> None:
    from rl4lms_like.tracking.rollouts import described, episodes_of

    # Printed one by one: the files of a long run may not fit into memory.
    episodes = episodes_of(options.run_folder, **_arguments(options, "iteration min_reward max_reward contains"))
    episode = None
    for episode in islice(episodes, options.limit):
        if options.json:
            _print_json(episode)
        else:
            print(described(episode))

    # To standard error, so that the output stays JSON lines.
    if episode is None:
        _say("no episode meets these conditions\n")


def _pretrain_critic(options: argparse.Namespace) -> None:
    from rl4lms_like.run import pretrain_critic

    config_path = options.config or options.config_path
    for line in pretrain_critic(config_path, options.output, overrides=options.overrides):
        print(line, flush=True)


def _pairs(options: argparse.Namespace) -> None:
    from rl4lms_like.config.run_config import load_config

    config = load_config(options.config or options.config_path, options.overrides)
    from rl4lms_like.sampled_pairs import write_pairs

    names = "n_samples split max_prompts min_difference"
    write_pairs(config, options.out, **_arguments(options, names), report=partial(print, flush=True))


def _post_train(options: argparse.Namespace) -> int:
    from rl4lms_like.post_train import post_train

    def say(text: str) -> None:
        if is_main_process():
            print(printable(without_secrets(text)), flush=True)

    names = "overrides model_index output_dir resume dry_run"
    return post_train(options.config, **_arguments(options, names), with_traceback=options.traceback, say=say)


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
    facts |= dict(_packages())
    for name, value in facts.items():
        print(f"{name}: {value}")


def _packages() -> Iterator[tuple[str, str]]:
    """Yield the dependencies of the library, including those of its extras, each with its version, once."""
    from packaging.requirements import Requirement

    seen = {PACKAGE}
    for requirement in map(Requirement, requires(PACKAGE) or ()):
        # A requirement of an extra has a marker such as `extra == "semantic"`. `all` repeats those of the others.
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

    return benchmark(options.spec, **_arguments(options, "processes seeds only results report_only ray"))


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
