"""The run folder: everything a run leaves behind, as files that any program can read while it runs.

    <base>/<project>/<experiment>/
        config.json                                   the run's config; its creation claims the folder
        log.txt                                       this library's messages
        rollout_info.jsonl                            one object an iteration: `rollout_info/*`, `time/*`
        training_info.jsonl                           one object an iteration: everything else
        {val,test}_split_metrics.jsonl                {"epoch": ..., "metrics": {...}}
        epoch_<epoch>_<split>_split_predictions.json  the texts and their scores
        environment.json                              versions, device, threads; an entry for each change
        alarms.jsonl  token_credit.jsonl              what watchers saw, one object a line
        checkpoints/  model/  best/                   written by the trainer
        finished.json                                 the run came to its end; written last
        failed_batch.json                             the texts that a reward or metric failed on, until the run goes on
        .lock                                         held by the process that writes here

A line is on disk as soon as it is logged. Numbers that JSON cannot say (NaN, infinities) are written as `null`.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rl4lms_like.core.disk import naming, reason, refuse_links, take_away
from rl4lms_like.core.errors import CheckpointError, ConfigError, Mistake, RL4LMsLikeError
from rl4lms_like.core.secrets import without_secrets
from rl4lms_like.tracking.sink import Epoch, Predictions, Sink

ROLLOUT_GROUPS = ("rollout_info/", "rollout/")
ROLLOUT_FILE = "rollout_info.jsonl"
TRAINING_FILE = "training_info.jsonl"
CONFIG_FILE = "config.json"
LOG_FILE = "log.txt"
LOCK_FILE = ".lock"
ENVIRONMENT_FILE = "environment.json"
FINISHED_FILE = "finished.json"
FAILED_FILE = "failed_batch.json"
METRICS_FILES = "*_split_metrics.jsonl"
ALARMS_FILE = "alarms.jsonl"
CREDIT_FILE = "token_credit.jsonl"
LINES_FILES = (ROLLOUT_FILE, TRAINING_FILE, ALARMS_FILE, CREDIT_FILE)
PREDICTIONS_FILES = "epoch_*_split_predictions.json"
CHECKPOINTS = "checkpoints"
REPORT_FILE = "report.html"
WANDB_FILES = {"wandb", "wandb_run.json"}
START_FILES = {CONFIG_FILE, LOG_FILE, LOCK_FILE, ENVIRONMENT_FILE, ALARMS_FILE, CREDIT_FILE, REPORT_FILE, *WANDB_FILES}
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
"""What a disk says that knows no locks, as some network disks do."""

_ESCAPED = "backslashreplace"
"""Half of a surrogate pair, which UTF-8 cannot say, becomes `\\ud83d`: the escape that JSON reads back."""

logger = logging.getLogger(__name__)


class RunFolder(Sink):
    """Writes the files of a run.

    Args:
        path: the folder, as returned by `claim_folder`.

    Raises:
        RL4LMsLikeError: one of the files is a link, or has another name elsewhere.
    """

    name = "json"

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_links((*(path / name for name in (*LINES_FILES, LOG_FILE)), *path.glob(METRICS_FILES)))
        for file in _files_of_lines(path):
            _drop_half_line(file)

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        head = {"iteration": iteration, "timesteps": timesteps}
        has_rollout = any(key.startswith(ROLLOUT_GROUPS) for key in values)
        groups = (*ROLLOUT_GROUPS, "time/") if has_rollout else ROLLOUT_GROUPS
        rollout = {key: value for key, value in values.items() if key.startswith(groups)}
        training = {key: value for key, value in values.items() if key not in rollout}
        for file, group in ((ROLLOUT_FILE, rollout), (TRAINING_FILE, training)):
            if group:
                self.append(file, {**head, **group})

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        self.append(f"{split_name}_split_metrics.jsonl", {"epoch": epoch, "metrics": metrics})

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        file = self.path / f"epoch_{epoch}_{split_name}_split_predictions.json"
        write_whole(file, json.dumps(to_json(list(predictions)), indent=1, ensure_ascii=False))

    def log_environment(self, environment: Mapping[str, Any]) -> None:
        """Adds what the run is computed by from now on, unless it is what it was."""
        file = self.path / ENVIRONMENT_FILE
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = []
        before = known if isinstance(known, list) else []
        if before[-1:] != [now := to_json(environment)]:
            write_whole(file, json.dumps([*before, now], indent=1) + "\n")

    def file_sizes(self, *, on_disk: bool = True) -> dict[str, int]:
        """Bytes of every file that grows line by line, all of them on the disk if asked for, and of the predictions."""
        for file in _files_of_lines(self.path) if on_disk else ():
            with naming(file), file.open("rb") as stream:
                os.fsync(stream.fileno())
        files = (*_files_of_lines(self.path), *self.path.glob(PREDICTIONS_FILES))
        return {file.name: file.stat().st_size for file in sorted(files)}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Takes away what was written after a checkpoint, which had these sizes.

        Raises:
            CheckpointError: see `check_sizes`.
        """
        check_sizes(self.path, sizes)
        for file in _files_of_lines(self.path):
            os.truncate(file, sizes.get(file.name, 0))
        for name in (FINISHED_FILE, FAILED_FILE):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob(PREDICTIONS_FILES):
            if file.name not in sizes:
                file.unlink()
        for file in self.path.glob(f"{PREDICTIONS_FILES}.partial"):  # a process was killed while it wrote it
            file.unlink()

    def finish(self, iterations: int) -> None:
        """Marks the run as one that came to its end, after everything else is on the disk."""
        self.file_sizes()
        write_whole(self.path / FINISHED_FILE, json.dumps({"iterations": iterations}) + "\n")
        with naming(self.path / FINISHED_FILE), (self.path / FINISHED_FILE).open("rb") as stream:
            os.fsync(stream.fileno())

    def keep_texts(self, said: str, texts: Sequence[Mapping[str, Any]]) -> Path:
        """Writes the texts that a component failed on; returns the file."""
        file = self.path / FAILED_FILE
        content = to_json({"error": without_secrets(said), "texts": list(texts)})
        write_whole(file, json.dumps(content, indent=1, ensure_ascii=False))
        return file

    def append(self, file: str, line: Mapping[str, Any]) -> None:
        """Adds a line to one of the files that grow line by line."""
        text = json.dumps(to_json(line), ensure_ascii=False, allow_nan=False) + "\n"
        path = self.path / file
        with naming(path), path.open("ab", buffering=0) as stream:
            size, left = stream.tell(), memoryview(text.encode(errors=_ESCAPED))
            try:
                while left:
                    left = left[stream.write(left) :]
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)  # half a line is none
                raise


def check_sizes(path: Path, sizes: Any) -> None:
    """Holds a run's files against the sizes that they had at a checkpoint, and changes nothing.

    Raises:
        CheckpointError: a file has less than it had then, or other lines.
    """
    if not isinstance(sizes, Mapping) or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise CheckpointError("the sizes of the run's files are not numbers")
    for name, size in sizes.items():
        if not re.fullmatch(r"[^/\\\0]+\.jsonl", name):
            continue  # predictions, which may be taken away
        file = path / name
        if size > (file.stat().st_size if file.is_file() else 0):
            raise CheckpointError(f"{file} has less than the {size} bytes it had at the checkpoint")
        with file.open("rb") as stream:
            stream.seek(max(size - 1, 0))
            if size and stream.read(1) != b"\n":
                raise CheckpointError(f"{file} was changed since the checkpoint: no line ends at byte {size}")


def experiment_folder(base: str | Path, project: str, experiment: str) -> Path:
    """`<base>/<project>/<experiment>`, absolute, which is below the base whatever the names are.

    Raises:
        ConfigError: a name would lead elsewhere, or cannot be a folder's.
    """
    mistakes = []
    for option, name in (("project_name", project), ("experiment_name", experiment)):
        parts = re.split(r"[/\\]", name)
        if not all(parts) or {".", ".."} & set(parts) or Path(name).drive or not name.isprintable():
            mistakes.append(Mistake(option, f"expected the name of a folder below {str(base)!r}, got {name!r}"))
    if mistakes:
        raise ConfigError(mistakes, "the names of the run")
    return Path(os.path.abspath(base)) / project / experiment


def claim_folder(
    wanted: Path, config: Mapping[str, Any], *, resume: bool = False, held: FileLock | None = None
) -> tuple[Path, FileLock]:
    """Makes the run's folder, holds it and writes `config.json` into it.

    A folder that holds a run already is left alone: the new run goes into `<experiment>_2`, `_3` ..., so that the lines
    of two runs never mix. Two processes that start at once get two folders.

    Args:
        wanted: `<base>/<project>/<experiment>`.
        config: the run's config as plain data.
        resume: continue in `wanted` itself, whatever it holds.
        held: the lock of `wanted`, if the caller holds it already.

    Returns:
        The folder that was taken, and its lock.

    Raises:
        RL4LMsLikeError: another process is writing to the folder that is to be resumed; or no tokenizer could be saved
            there.
    """
    try:
        str(wanted).encode()
    except UnicodeEncodeError as error:
        said = f"cannot save models in {str(wanted)!r}: this name is not text in UTF-8"
        raise RL4LMsLikeError(f"{said}; choose another one, or set PYTHONUTF8=1 if it looks well elsewhere") from error
    text = json.dumps(to_json(config), indent=2, ensure_ascii=False) + "\n"
    if resume:
        wanted.mkdir(parents=True, exist_ok=True)
        lock = held or hold(wanted)  # nothing is written before it is held
        write_whole(wanted / CONFIG_FILE, text)
        return wanted, lock
    for path in numbered(wanted):
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG_FILE).exists():
            continue
        own = try_hold(path)
        if own is None:  # another process is about to claim it
            continue
        file = path / CONFIG_FILE
        try:
            with naming(file), file.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError:
            own.release()
            continue
        except OSError:
            file.unlink(missing_ok=True)  # the folder is claimed by no run
            own.release()
            raise
        return path, own
    raise AssertionError("unreachable: there is always one more")


def is_untrained(path: Path) -> bool:
    """Return whether a run's folder holds only what a run writes before its first iteration."""
    return all(_is_of_the_start(file) for file in path.iterdir())


def _is_of_the_start(file: Path) -> bool:
    if file.name == CHECKPOINTS:
        return file.is_dir() and not any(file.iterdir())
    if file.name in (ROLLOUT_FILE, TRAINING_FILE):
        return file.stat().st_size == 0
    if file.match(METRICS_FILES):
        first = '{"epoch": 0,'
        return all(first.startswith(line[: len(first)]) for line in file.read_text(encoding="utf-8").splitlines())
    if file.match(f"{PREDICTIONS_FILES}*"):
        return file.name.startswith("epoch_0_")
    return file.name in START_FILES or file.name.endswith(".partial")


def numbered(wanted: Path) -> Iterator[Path]:
    """`wanted`, `wanted_2`, `wanted_3` ..., where the runs of one experiment go."""
    yield wanted
    for number in count(2):
        yield wanted.with_name(f"{wanted.name}_{number}")


def hold(path: Path) -> FileLock:
    """The folder's lock, held until it is released or the process ends, however it ends.

    Raises:
        RL4LMsLikeError: another process holds it.
    """
    lock = try_hold(path)
    if lock is None:
        raise RL4LMsLikeError(f"another process is writing to {path}; wait until it has ended")
    return lock


def try_hold(path: Path) -> FileLock | None:
    """As `hold`; None if another process holds it."""
    refuse_links([path / LOCK_FILE])
    lock = FileLock(path / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            said = reason(error) if isinstance(error, OSError) else error
            raise RL4LMsLikeError(f"cannot write to the run folder {path}: {said}") from error
        logger.warning("%s: this disk knows no locks; take care that one process alone writes there", path)
    return lock


def to_json(value: Any) -> Any:
    """`value` as data that JSON can say.

    Scalars and arrays of numpy and torch become numbers and lists, numbers that are not finite None, and objects of
    other kinds, paths for instance, their text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return str(value)


def first_scores(path: Path) -> dict[str, dict[str, Any]]:
    """The metrics of a run's first evaluation by split, as far as its folder has any."""
    found = {}
    for file in path.glob(METRICS_FILES):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError), file.open(encoding="utf-8") as lines:
            found[file.name.removesuffix(METRICS_FILES[1:])] = dict(json.loads(next(lines, ""))["metrics"])
    return found


def _files_of_lines(path: Path) -> list[Path]:
    """Files of this library that grow line by line; a user's own are left alone."""
    return [file for name in (*LINES_FILES, METRICS_FILES) for file in sorted(path.glob(name))]


def write_whole(file: Path, text: str) -> None:
    """Writes a file as a whole or not at all, so that a crash never leaves half a JSON file."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        take_away(partial)
        with naming(file):
            partial.write_text(text, encoding="utf-8", errors=_ESCAPED)
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)  # a full disk would stay full
        raise


def _drop_half_line(file: Path) -> None:
    """Cuts off the line that a crash interrupted, so that a resumed run does not write onto it."""
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)  # takes no room, where the disk has none
