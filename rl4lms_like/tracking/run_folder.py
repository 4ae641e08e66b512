"""Run folder: the files of a run, readable by other programs while the run is active.

    <base>/<project>/<experiment>/
        config.json                                   the run's config; its creation claims the folder
        log.txt                                       this library's messages
        rollout_info.jsonl                            one object per iteration: `rollout_info/*`, `time/*`
        training_info.jsonl                           one object per iteration: all other values
        {val,test}_split_metrics.jsonl                {"epoch": ..., "metrics": {...}}
        epoch_<epoch>_<split>_split_predictions.json  the texts and their scores
        environment.json                              versions, device, threads; an entry for each change
        accepted_changes.json                         changes on resuming that affect results; an entry for each
        alarms.jsonl  token_credit.jsonl              records of callbacks, one object per line
        images/                                       thumbnails of pictures that these files name
        checkpoints/  model/  best/  rollouts/        written by the trainer
        finished.json                                 marks a finished run; written last
        failed_batch.json                             texts that a reward or metric failed on; deleted on resume
        .lock                                         held by the process that writes here

A line is written to its file as soon as it is logged. NaN and infinities are written as `null`.
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

from rl4lms_like.system.disk import flush, reason, refuse_links, remove_path, with_filename
from rl4lms_like.system.errors import CheckpointError, ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.regular_files import read_json, require_regular_file
from rl4lms_like.system.secrets import without_secrets
from rl4lms_like.tracking.sink import Epoch, Predictions, Sink

ROLLOUT_GROUPS = ("rollout_info/", "rollout/")
ROLLOUT_FILE = "rollout_info.jsonl"
TRAINING_FILE = "training_info.jsonl"
CONFIG_FILE = "config.json"
LOG_FILE = "log.txt"
LOCK_FILE = ".lock"
ENVIRONMENT_FILE = "environment.json"
CHANGES_FILE = "accepted_changes.json"
FINISHED_FILE = "finished.json"
FAILED_FILE = "failed_batch.json"
METRICS_FILES = "*_split_metrics.jsonl"
ALARMS_FILE = "alarms.jsonl"
CREDIT_FILE = "token_credit.jsonl"
LINES_FILES = (ROLLOUT_FILE, TRAINING_FILE, ALARMS_FILE, CREDIT_FILE)
PREDICTIONS_FILES = "epoch_*_split_predictions.json"
CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts"
IMAGES = "images"
REPORT_FILE = "report.html"
START_FILES = {CONFIG_FILE, LOG_FILE, LOCK_FILE, ENVIRONMENT_FILE, ALARMS_FILE, CREDIT_FILE, REPORT_FILE}
START_FILES |= {CHANGES_FILE, "wandb", "wandb_run.json", "trackio_run.json"}
START_FILES |= {ROLLOUTS, IMAGES}  # the first rollout precedes the first iteration's lines
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}  # as some network file systems raise
_ESCAPED = "backslashreplace"  # lone surrogates, which are invalid in UTF-8, become the JSON escape `\ud83d`
logger = logging.getLogger(__name__)


class RunFolder(Sink):
    """Sink that writes the files of a run to the folder returned by `claim_folder`.

    Raises:
        RL4LMsLikeError: one of the files is a symbolic or hard link.
    """

    name = "json"

    def __init__(self, path: Path) -> None:
        self.path = path
        # Files that are appended to: a link could lead to a file outside of the folder. Files that are written whole
        # are replaced, and with them a link.
        refuse_links((*(path / name for name in (*LINES_FILES, LOG_FILE)), *path.glob(METRICS_FILES)))
        for file in _files_of_lines(path):
            _drop_half_line(file)

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        # Times are of the whole iteration: they are written once, with the rollout if there is one.
        has_rollout = any(key.startswith(ROLLOUT_GROUPS) for key in values)
        groups = (*ROLLOUT_GROUPS, "time/") if has_rollout else ROLLOUT_GROUPS
        rollout = {key: value for key, value in values.items() if key.startswith(groups)}
        training = {key: value for key, value in values.items() if key not in rollout}

        head = {"iteration": iteration, "timesteps": timesteps}
        if rollout:
            self.append(ROLLOUT_FILE, {**head, **rollout})
        if training:
            self.append(TRAINING_FILE, {**head, **training})

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        self.append(f"{split_name}_split_metrics.jsonl", {"epoch": epoch, "metrics": metrics})

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        file = self.path / f"epoch_{epoch}_{split_name}_split_predictions.json"
        write_whole(file, json.dumps(to_json(list(predictions)), indent=1, ensure_ascii=False))

    def log_environment(self, environment: Mapping[str, Any]) -> None:
        """Append the current hardware and software, if they differ from the last entry."""
        # A damaged file is replaced: it must not keep a run from being resumed.
        file = self.path / ENVIRONMENT_FILE
        try:
            entries = read_json(file)
        except (OSError, ValueError, RL4LMsLikeError):
            entries = []
        if not isinstance(entries, list):
            entries = []

        entry = to_json(environment)
        if entries[-1:] != [entry]:
            write_whole(file, json.dumps([*entries, entry], indent=1) + "\n")

    def file_sizes(self, *, on_disk: bool = True) -> dict[str, int]:
        """Return the sizes of line files and predictions in bytes; `on_disk` flushes line files to disk first."""
        for file in _files_of_lines(self.path) if on_disk else ():
            with with_filename(file):
                flush(file)
        files = (*_files_of_lines(self.path), *self.path.glob(PREDICTIONS_FILES))
        return {file.name: file.stat().st_size for file in sorted(files)}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Remove what was written after a checkpoint with these file sizes; errors as in `check_sizes`."""
        check_sizes(self.path, sizes)

        # A file that did not exist at the checkpoint becomes empty.
        for file in _files_of_lines(self.path):
            os.truncate(file, sizes.get(file.name, 0))

        # What the rest of the interrupted run has left: its end, its failure and its later evaluations.
        for name in (FINISHED_FILE, FAILED_FILE):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob(PREDICTIONS_FILES):
            if file.name not in sizes:
                file.unlink()
        for file in self.path.glob(f"{PREDICTIONS_FILES}.partial"):  # left by a process that was killed while writing
            file.unlink()

    def finish(self, iterations: int) -> None:
        """Mark the run as finished, after all other files are flushed to disk."""
        self.file_sizes()
        write_whole(self.path / FINISHED_FILE, json.dumps({"iterations": iterations}) + "\n")
        with with_filename(self.path / FINISHED_FILE):
            flush(self.path / FINISHED_FILE)

    def keep_texts(self, message: str, texts: Sequence[Mapping[str, Any]]) -> Path:
        """Write the texts that a component failed on; return the file."""
        file = self.path / FAILED_FILE
        content = to_json({"error": without_secrets(message), "texts": list(texts)})
        write_whole(file, json.dumps(content, indent=1, ensure_ascii=False))
        return file

    def append(self, file: str, line: Mapping[str, Any]) -> None:
        """Append a line to a line file."""
        text = json.dumps(to_json(line), ensure_ascii=False, allow_nan=False) + "\n"
        path = self.path / file

        # Without a buffer, so that another program sees the line at once. Such a write may write only a part.
        with with_filename(path), path.open("ab", buffering=0) as stream:
            size = stream.tell()
            unwritten = memoryview(text.encode(errors=_ESCAPED))
            try:
                while unwritten:
                    unwritten = unwritten[stream.write(unwritten) :]
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)  # remove the incomplete line
                raise


def check_sizes(path: Path, sizes: Any) -> None:
    """Compare a run's files with their sizes at a checkpoint, without changing them.

    Raises:
        CheckpointError: a file is shorter than at the checkpoint, or was changed.
    """
    if not isinstance(sizes, Mapping) or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise CheckpointError("the sizes of the run's files are not numbers")
    for name, size in sizes.items():
        if not re.fullmatch(r"[^/\\\0]+\.jsonl", name):
            continue  # predictions, which may be deleted

        # The checkpoint was written between two lines: at its size a line ends.
        file = path / name
        if size > (file.stat().st_size if file.is_file() else 0):
            raise CheckpointError(f"{file} is shorter than the {size} bytes it had at the checkpoint")
        with file.open("rb") as stream:
            stream.seek(max(size - 1, 0))
            if size and stream.read(1) != b"\n":
                raise CheckpointError(f"{file} was changed after the checkpoint: no line ends at byte {size}")


def experiment_folder(base: str | Path, project: str, experiment: str) -> Path:
    """Return the absolute path `<base>/<project>/<experiment>`.

    Raises:
        ConfigError: a name leads outside of the base, or is not a valid folder name.
    """
    issues = []
    for option, name in (("project_name", project), ("experiment_name", experiment)):
        # A name may contain slashes; then it stands for nested folders below the base.
        folder_names = re.split(r"[/\\]", name)
        leads_outside = bool({".", ".."} & set(folder_names)) or bool(Path(name).drive)
        if not all(folder_names) or leads_outside or not name.isprintable():
            issues.append(ConfigIssue(option, f"expected the name of a folder in {str(base)!r}, got {name!r}"))
    if issues:
        raise ConfigError(issues, "the names of the run")
    return Path(os.path.abspath(base)) / project / experiment


def claim_folder(
    folder: Path, config: Mapping[str, Any], *, resume: bool = False, held: FileLock | None = None
) -> tuple[Path, FileLock]:
    """Create the run's folder, lock it and write `config.json`; return the folder and its lock.

    If the folder already contains a run, the new run uses `<experiment>_2`, `_3` ..., so that the lines of two runs
    never mix. Two processes that start at the same time get two folders.

    With `resume`, the run continues in `folder` itself, whatever it contains; `held` is its lock if the caller has it.

    Raises:
        RL4LMsLikeError: another process is writing to the folder that is to be resumed; or tokenizers cannot be saved
            under this path.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        message = f"cannot save models in {str(folder)!r}: this path is not text in UTF-8"
        raise RL4LMsLikeError(f"{message}; choose another path, or set PYTHONUTF8=1 if the path is correct") from error

    text = json.dumps(to_json(config), indent=2, ensure_ascii=False) + "\n"
    if resume:
        folder.mkdir(parents=True, exist_ok=True)
        lock = held or hold(folder)  # nothing is written before the folder is locked
        write_whole(folder / CONFIG_FILE, text)
        return folder, lock

    for path in numbered(folder):
        path.mkdir(parents=True, exist_ok=True)
        file = path / CONFIG_FILE
        if file.exists():
            continue
        lock_of_path = try_hold(path)
        if lock_of_path is None:  # another process is claiming it
            continue

        # Mode "x" fails if the file exists: on a file system without locks, it still decides between two processes.
        try:
            with with_filename(file), file.open("x", encoding="utf-8") as stream:
                stream.write(text)
            return path, lock_of_path
        except FileExistsError:
            lock_of_path.release()
        except OSError:
            file.unlink(missing_ok=True)  # the folder is not claimed
            lock_of_path.release()
            raise
    raise AssertionError("unreachable: numbered() is infinite")


def is_untrained(path: Path) -> bool:
    """Return True if a folder contains only files that are written before the first iteration."""
    return all(_is_of_the_start(file) for file in path.iterdir())


def _is_of_the_start(file: Path) -> bool:
    """Return True if a file or folder is empty, or of the evaluation before the first iteration (epoch 0)."""
    if file.name == CHECKPOINTS:
        return file.is_dir() and not any(file.iterdir())
    if file.name in (ROLLOUT_FILE, TRAINING_FILE):
        return file.stat().st_size == 0

    # The beginning of each line is compared, which may be shorter: a line may be incomplete after a crash.
    if file.match(METRICS_FILES):
        require_regular_file(file)
        first = '{"epoch": 0,'
        return all(first.startswith(line[: len(first)]) for line in file.read_text(encoding="utf-8").splitlines())
    if file.match(f"{PREDICTIONS_FILES}*"):
        return file.name.startswith("epoch_0_")
    return file.name in START_FILES or file.name.endswith(".partial")


def numbered(folder: Path) -> Iterator[Path]:
    """Yield `folder`, `folder_2`, `folder_3` ..., the folders of an experiment's runs."""
    yield folder
    for number in count(2):
        yield folder.with_name(f"{folder.name}_{number}")


def hold(path: Path) -> FileLock:
    """Lock the folder until the process ends; if another process holds the lock, raise an `RL4LMsLikeError`."""
    lock = try_hold(path)
    if lock is None:
        raise RL4LMsLikeError(f"another process is writing to {path}; wait until it has ended")
    return lock


def try_hold(path: Path, name: str = LOCK_FILE) -> FileLock | None:
    """Lock the folder with the file `name`, as in `hold`; return None if another process holds the lock."""
    refuse_links([path / name])
    lock = FileLock(path / name)

    # A file system without locks gives a lock that is not held: a run there is better than none.
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise RL4LMsLikeError(f"cannot write to the run folder {path}: {reason(error)}") from error
        logger.warning("%s: this file system has no locks; make sure that only one process writes there", path)
    return lock


def to_json(value: Any) -> Any:
    """Convert `value` to JSON data.

    Scalars and arrays of NumPy and torch become numbers and lists, non-finite numbers become None, and other objects
    such as paths become text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()

    # JSON has no NaN: other programs refuse a file with one.
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
    """Return the metrics of a run's first evaluation by split; splits without metrics are left out."""
    scores_by_split: dict[str, dict[str, Any]] = {}
    for file in path.glob(METRICS_FILES):
        split = file.name.removesuffix(METRICS_FILES[1:])
        require_regular_file(file)
        # The console compares with these; a damaged file costs the comparison, not the run.
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError), file.open(encoding="utf-8") as lines:
            scores_by_split[split] = dict(json.loads(next(lines, ""))["metrics"])
    return scores_by_split


def _files_of_lines(path: Path) -> list[Path]:
    """Return the line files of this library, without files of the user."""
    files: list[Path] = []
    for pattern in (*LINES_FILES, METRICS_FILES):
        files += sorted(path.glob(pattern))
    return files


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file atomically, so that a crash never leaves an incomplete JSON file or image."""
    partial = file.with_name(f"{file.name}.partial")

    # A left-over of an earlier process could be a link, through which this one would write.
    try:
        remove_path(partial)
        with with_filename(file):
            if isinstance(content, bytes):
                partial.write_bytes(content)
            else:
                partial.write_text(content, encoding="utf-8", errors=_ESCAPED)
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)  # frees the space if the disk is full
        raise


def _drop_half_line(file: Path) -> None:
    """Remove an incomplete last line, so that a resumed run does not append to it."""
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(file, content.rfind(b"\n") + 1)  # needs no free disk space
