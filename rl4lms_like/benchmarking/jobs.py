"""Jobs of a benchmark: a label, a seed, a config and a folder. Their state is read from the folders only.

    <results>/runs/<label>/seed_<k>/
        job.json       label, seed and config; written before the run starts
        output.txt     output of its processes
        config.json, log.txt, *.jsonl, report.html, model/ ...     the run folder, as for `train`
        job.lock       held by its process
    result.json    scores and costs; written last, so that its presence means success

A run is done if its folder has a result for the current config of the benchmark. A stopped run of the same config is
resumed from its newest checkpoint. All other runs are started from the beginning.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rl4lms_like.benchmarking.spec import Benchmark
from rl4lms_like.config.load import parse_config
from rl4lms_like.system.disk import refuse_links_to_folders
from rl4lms_like.system.errors import CheckpointError, ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.regular_files import read_json, read_small
from rl4lms_like.system.secrets import without_secrets
from rl4lms_like.system.wording import printable
from rl4lms_like.tracking.record import LARGEST, LARGEST_COUNT
from rl4lms_like.tracking.run_folder import FINISHED_FILE, LOCK_FILE, to_json, try_hold, write_whole
from rl4lms_like.training.resuming.checkpoints import newest_checkpoint

RUNS = "runs"
REPLACED = "replaced"
JOB_FILE = "job.json"
OUTPUT_FILE = "output.txt"
RESULT_FILE = "result.json"
JOB_LOCK = "job.lock"
GRACE_S = 60.0
"""Seconds that a run has to save its model when it is asked to end."""

State = Literal["done", "changed", "stopped", "unfinished", "new"]
"""`stopped`: unfinished, and can be resumed."""

STATE_TEXTS: dict[State, str] = {
    "done": "done",
    "changed": "has a result of a different config",
    "stopped": "did not finish, and is resumed when the benchmark is started again",
    "unfinished": "did not finish",
    "new": "was not started",
}
Count = Annotated[int, Interval(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, Interval(ge=-LARGEST, le=LARGEST)]


@dataclass(frozen=True)
class Job:
    """Run of a benchmark: the label of its cell, its seed, its complete config as plain data, and its folder."""

    label: str
    seed: int
    config: Mapping[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        """Display name, `label, seed k`."""
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """Result of one run, saved as `result.json`.

    Args:
        label: label of its cell.
        seed: seed of the run.
        scores: `split:metric` -> corpus score of the last evaluation.
        iterations: number of completed iterations.
        tokens: number of tokens generated in training.
        seconds: wall time of the process, from its start to the last file; None if the run was resumed, because the
            time of a killed process is unknown.
        peak_memory_mb: largest resident memory of its last process, MiB; None if the system does not report it.
        peak_gpu_memory_mb: largest memory allocated on the GPU, MiB; None without a GPU.
        model_mb: size of the saved model's files, MiB; None if none was saved.
        versions: package -> version.
        resumed: number of times the run was resumed.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    label: str
    seed: Count
    scores: dict[str, Number | None]
    iterations: Count
    tokens: Count
    seconds: Number | None
    peak_memory_mb: Number | None
    peak_gpu_memory_mb: Number | None
    model_mb: Number | None
    versions: dict[str, str]
    resumed: Count = 0


def jobs_of(benchmark: Benchmark, only: Sequence[str] = ()) -> list[Job]:
    """Return all jobs, ordered by seed, so that an interrupted benchmark has results of every label.

    Args:
        benchmark: the spec.
        only: labels; default: all.

    Raises:
        ConfigError: `only` names a label that does not exist.
    """
    labels = [cell.label for cell in benchmark.cells]
    unknown = [label for label in only if label not in labels]
    if unknown:
        message = f"no run has the label {', '.join(unknown)}; available: {'; '.join(labels)}"
        raise ConfigError([ConfigIssue("--only", message)], f"the command line, for the benchmark {benchmark.name}")

    # Seeds outside: after the first seed there is a result of each label.
    jobs = []
    for seed in benchmark.seeds:
        for cell in benchmark.cells:
            if only and cell.label not in only:
                continue
            config = _plain(replace(cell.config, seed=seed).to_dict())
            folder = benchmark.results / RUNS / cell.label / f"seed_{seed}"
            jobs.append(Job(cell.label, seed, config, folder))
    return jobs


def state_of(job: Job) -> State:
    """Return the state of a job, which decides whether it is run.

    A config written by an earlier version of the library may lack newer keys. It is completed with the current defaults
    before the comparison. A new key then does not invalidate old results, but a changed default does.
    """
    if not job.folder.is_dir():
        return "new"
    config_before = (_object_in(job.folder / JOB_FILE) or {}).get("config")
    if not isinstance(config_before, dict):
        return "unfinished"
    is_same = config_before == job.config or _completed(config_before) == job.config

    # The result is written last: only with it is a run done.
    if _object_in(job.folder / RESULT_FILE) is not None:
        return "done" if is_same else "changed"
    return "stopped" if is_same and _can_resume(job.folder) else "unfinished"


def _can_resume(folder: Path) -> bool:
    """Return True if there is a checkpoint to resume from, or a finished run that lacks only its result."""
    try:
        return (folder / FINISHED_FILE).exists() or newest_checkpoint(folder).is_dir()
    except CheckpointError:
        return False


def prepare_folder(job: Job) -> None:
    """Prepare the folder with `job.json`: that of a run to resume, or a new one.

    A finished run of another config is moved to `replaced/`. An unfinished run that cannot be resumed is removed.

    Raises:
        RL4LMsLikeError: a run of a killed benchmark still writes to the folder and does not end.
    """
    refuse_links_to_folders([job.folder])

    # First, since a run that still saves itself changes its own state.
    _wait_for_its_end(job.folder)
    state = state_of(job)

    # <results>/replaced/<label>/seed_<k>_<number>: a finished run cost hours, so it is never deleted.
    if state in ("changed", "done"):
        replaced = job.folder.parents[2] / REPLACED / job.label
        candidates = (replaced / f"{job.folder.name}_{number}" for number in count(1))
        replaced_run = next(candidate for candidate in candidates if not candidate.exists())
        replaced_run.parent.mkdir(parents=True, exist_ok=True)
        os.replace(job.folder, replaced_run)
    elif state == "unfinished":
        shutil.rmtree(job.folder)

    n_resumed = 0
    if state == "stopped":
        n_resumed = int((_object_in(job.folder / JOB_FILE) or {}).get("resumed", 0)) + 1
    job.folder.mkdir(parents=True, exist_ok=state == "stopped")

    # Also for a stopped run: its config may have been written by an earlier version, without newer keys.
    content = {"label": job.label, "seed": job.seed, "config": job.config, "resumed": n_resumed}
    write_whole(job.folder / JOB_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def at_work(folder: Path, name: str = JOB_LOCK) -> Iterator[bool]:
    """Lock the folder of a run until it ends, in case its benchmark is killed; yield False if it is locked already."""
    lock = try_hold(folder, name)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def claimed(results: Path) -> Iterator[None]:
    """Lock a results folder against other benchmarks.

    Raises:
        RL4LMsLikeError: another process holds the lock.
    """
    results.mkdir(parents=True, exist_ok=True)
    with at_work(results, LOCK_FILE) as is_free:
        if not is_free:
            raise RL4LMsLikeError(f"another benchmark is running in {results}; wait, or choose another --results")
        yield


def _wait_for_its_end(folder: Path) -> None:
    """Wait for a run that is still saving its state after its benchmark was killed."""
    deadline = time.monotonic() + GRACE_S
    while folder.is_dir():
        # The lock is that of the run's process, which lives on when its benchmark is killed.
        with at_work(folder) as is_free:
            if is_free:
                return
        if time.monotonic() > deadline:
            raise RL4LMsLikeError(f"{folder}: a run of an earlier benchmark is still active there; end its process")
        time.sleep(0.1)


def write_result(folder: Path, result: Result) -> None:
    """Write `result.json` atomically."""
    write_whole(folder / RESULT_FILE, json.dumps(to_json(asdict(result)), indent=2, ensure_ascii=False) + "\n")


def read_result(folder: Path) -> Result:
    """Read the result of a run.

    Raises:
        RL4LMsLikeError: the file was not written by a benchmark.
    """
    try:
        return TypeAdapter(Result).validate_json(read_small(folder / RESULT_FILE), strict=True)
    except FileNotFoundError as error:
        raise RL4LMsLikeError(f"{folder / RESULT_FILE} does not exist") from error
    except ValidationError as error:
        first = error.errors()[0]
        detail = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise RL4LMsLikeError(f"{folder / RESULT_FILE} is not a valid result of a benchmark: {detail}") from error


def _object_in(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none, or the file is incomplete."""
    try:
        content = read_json(file)
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def last_lines(folder: Path, n_lines: int = 5) -> list[str]:
    """Return the last lines of the output of a run's process."""
    file = folder / OUTPUT_FILE
    if not file.is_file():
        return []
    # Whatever a component prints: secrets, and control characters that would change the terminal.
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    texts = [line.rstrip() for line in lines if line.strip()]
    return [printable(without_secrets(text)) for text in texts[-n_lines:]]


def _plain(config: Mapping[str, Any]) -> Any:
    """Convert a config to plain data, as read from `job.json`."""
    return json.loads(json.dumps(config, default=str))


def _completed(config: Mapping[str, Any]) -> Any:
    """Return a config with the current defaults; None if it is not valid any more."""
    try:
        return _plain(parse_config(config).to_dict())
    except ConfigError:
        return None
