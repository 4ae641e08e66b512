"""One run of a benchmark: a label, a seed, a config and a folder. What is done is read from the folders alone.

    <results>/runs/<label>/seed_<k>/
        job.json       what shall be run; written before the run starts
        output.txt     what its processes printed
        config.json, log.txt, *.jsonl, report.html, model/ ...     the run folder as of `train`
        result.json    what came out; written last, so a folder with it is a run that ended well

A run is done if its folder has a result for the config that the benchmark asks for today. One of that config that was
stopped goes on from its newest checkpoint. Anything else is run from its start.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

from rl4lms_like.benchmarking.spec import Benchmark
from rl4lms_like.core.disk import refuse_links
from rl4lms_like.core.errors import CheckpointError, ConfigError, Mistake, RL4LMsLikeError
from rl4lms_like.core.secrets import without_secrets
from rl4lms_like.core.wording import printable, shown
from rl4lms_like.tracking.record import number
from rl4lms_like.tracking.run_folder import FINISHED_FILE, to_json, write_whole
from rl4lms_like.training.config.run_config import parse_config
from rl4lms_like.training.resuming.checkpoints import newest_checkpoint

RUNS, REPLACED = "runs", "replaced"
JOB_FILE, OUTPUT_FILE, RESULT_FILE = "job.json", "output.txt", "result.json"
LOCK_FILE = ".lock"
GRACE_S = 60.0
"""How long a run may take to save its model when it is asked to end."""

State = Literal["done", "changed", "stopped", "unfinished", "new"]
"""`stopped`: unfinished, and can go on."""


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        label: of its cell.
        seed: of this run.
        config: plain data, complete.
        folder: its run folder.
    """

    label: str
    seed: int
    config: Mapping[str, Any]
    folder: Path

    @property
    def name(self) -> str:
        """`label, seed k`, for people."""
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """What came out of one run; `result.json`.

    Args:
        label: of its cell.
        seed: of the run.
        scores: `split:metric` -> corpus score of the last evaluation.
        iterations: that were done.
        tokens: generated in training.
        seconds: wall time of the process, from its start to the last file; None if the run was stopped and went on,
            for nobody knows how long a process took that was killed.
        peak_memory_mb: largest resident memory of its last process, MiB; None where the system does not tell.
        peak_gpu_memory_mb: largest memory allocated on the GPU, MiB; None without one.
        model_mb: files of the saved model, MiB; None if none was saved.
        versions: package -> version.
        resumed: how often the run went on after it was stopped.
    """

    label: str
    seed: int
    scores: Mapping[str, float | None]
    iterations: int
    tokens: int
    seconds: float | None
    peak_memory_mb: float | None
    peak_gpu_memory_mb: float | None
    model_mb: float | None
    versions: Mapping[str, str]
    resumed: int = 0


_COUNTS = ("seed", "iterations", "tokens", "seconds", "peak_memory_mb", "peak_gpu_memory_mb", "model_mb", "resumed")


def said(state: State) -> str:
    """A state in words."""
    words = {
        "done": "done",
        "changed": "has a result of another config",
        "stopped": "did not end well, and goes on when the benchmark is started again",
        "unfinished": "did not end well",
    }
    return words.get(state, "was not started")


def jobs_of(benchmark: Benchmark, only: Sequence[str] = ()) -> list[Job]:
    """All runs, seed by seed, so that a benchmark that is cut short has something of every label.

    Args:
        benchmark: the spec.
        only: labels; default: all.

    Raises:
        ConfigError: `only` names a label that is not there.
    """
    labels = [cell.label for cell in benchmark.cells]
    unknown = [label for label in only if label not in labels]
    if unknown:
        message = f"no run is called {', '.join(unknown)}; there are {'; '.join(labels)}"
        raise ConfigError([Mistake("--only", message)], f"the command line, for the benchmark {benchmark.name}")
    return [
        Job(cell.label, seed, _plain(cell.with_seed(seed).to_dict()), folder_of(benchmark.results, cell.label, seed))
        for seed in benchmark.seeds
        for cell in benchmark.cells
        if not only or cell.label in only
    ]


def folder_of(results: Path, label: str, seed: int) -> Path:
    """Where a run keeps its files."""
    return results / RUNS / label / f"seed_{seed}"


def state_of(job: Job) -> State:
    """Whether a job has to be run: the one place that decides it.

    A config written by an earlier version of the library lacks keys that came later. It is completed with today's
    defaults before it is compared, so that a new key does not make old results void, and a changed default does.
    """
    if not job.folder.is_dir():
        return "new"
    try:
        before = dict(_object_in(job.folder / JOB_FILE)["config"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return "unfinished"
    is_same = before == job.config or _completed(before) == job.config
    try:
        _object_in(job.folder / RESULT_FILE)
    except (FileNotFoundError, ValueError):
        return "stopped" if is_same and _can_go_on(job.folder) else "unfinished"
    return "done" if is_same else "changed"


def _can_go_on(folder: Path) -> bool:
    """Whether there is something to go on from: a checkpoint, or a run whose result alone is missing."""
    try:
        return (folder / FINISHED_FILE).exists() or newest_checkpoint(folder).is_dir()
    except CheckpointError:
        return False


def prepare_folder(job: Job) -> None:
    """The folder with `job.json`: that of a run that goes on, or a fresh one.

    A finished run of another config is set aside, an unfinished one that cannot go on is removed.

    Raises:
        RL4LMsLikeError: a run of a benchmark that was killed is still at work there, and does not end.
    """
    _wait_for_its_end(job.folder)
    state = state_of(job)
    if state in ("changed", "done"):
        results = job.folder.parents[2]
        for number in count(1):
            aside = results / REPLACED / job.label / f"{job.folder.name}_{number}"
            if not aside.exists():
                break
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.replace(job.folder, aside)
    elif state == "unfinished":
        shutil.rmtree(job.folder)
    resumed = _resumed(job.folder) + 1 if state == "stopped" else 0
    job.folder.mkdir(parents=True, exist_ok=state == "stopped")
    content = {"label": job.label, "seed": job.seed, "config": job.config, "resumed": resumed}
    write_whole(job.folder / JOB_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _resumed(folder: Path) -> int:
    """How often a run went on so far."""
    return int(json.loads((folder / JOB_FILE).read_text(encoding="utf-8")).get("resumed", 0))


@contextmanager
def claimed(results: Path) -> Iterator[None]:
    """Keeps a second benchmark out of a results folder while one runs there, on systems that have `flock`.

    Raises:
        RL4LMsLikeError: another process has claimed it.
    """
    results.mkdir(parents=True, exist_ok=True)
    refuse_links([results / LOCK_FILE])
    with (results / LOCK_FILE).open("w") as file:
        if not _lock(file):
            raise RL4LMsLikeError(f"another benchmark is running in {results}; wait, or name other --results")
        yield


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Keeps a later benchmark out of a run's folder until the run is over, should its own benchmark be killed."""
    with (folder / JOB_FILE).open("r+") as file:
        _lock(file)
        yield


def _wait_for_its_end(folder: Path) -> None:
    """Waits for a run that saves what it has after its benchmark was killed."""
    deadline = time.monotonic() + GRACE_S
    while (folder / JOB_FILE).is_file() and not _is_free(folder / JOB_FILE):
        if time.monotonic() > deadline:
            raise RL4LMsLikeError(f"{folder}: a run of an earlier benchmark is at work there and does not end; end it")
        time.sleep(0.1)


def _is_free(file: Path) -> bool:
    with file.open("r+") as handle:
        return _lock(handle)


def _lock(file: IO[str]) -> bool:
    """Locks a file until it is closed, and says whether nobody else had; always true where there is no `flock`."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_result(folder: Path, result: Result) -> None:
    """Writes `result.json`, all of it or nothing."""
    write_whole(folder / RESULT_FILE, json.dumps(to_json(asdict(result)), indent=2, ensure_ascii=False) + "\n")


def read_result(folder: Path) -> Result:
    """A run's result.

    Raises:
        RL4LMsLikeError: there is none, or it is not what a benchmark wrote.
    """
    try:
        result = Result(**_object_in(folder / RESULT_FILE))
        counts = {name: value for name, value in vars(result).items() if name in _COUNTS and value is not None}
        for name, value in {**result.scores, **counts}.items():
            if value is not None and number(value) is None:
                raise ValueError(f"{name} is {shown(value)}")
        if not isinstance(result.versions, dict):
            raise TypeError(f"versions is {shown(result.versions)}")
    except FileNotFoundError as error:
        raise RL4LMsLikeError(f"{folder} has no {RESULT_FILE}: the run did not end") from error
    except (TypeError, ValueError) as error:
        raise RL4LMsLikeError(f"{folder / RESULT_FILE} is not what a benchmark wrote: {error}") from error
    return result


def _object_in(file: Path) -> dict[str, Any]:
    """A file of JSON, which another process, a crash or somebody else may have written.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it holds something else than an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds {shown(content)}")
    return content


def last_lines(folder: Path, n_lines: int = 5) -> list[str]:
    """The end of what a run's process printed."""
    file = folder / OUTPUT_FILE
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return [printable(without_secrets(line.rstrip())) for line in lines if line.strip()][-n_lines:]


def _plain(config: Mapping[str, Any]) -> Any:
    """As it comes back from `job.json`."""
    return json.loads(json.dumps(config, default=str))


def _completed(config: Mapping[str, Any]) -> Any:
    try:
        return _plain(parse_config(config).to_dict())
    except ConfigError:
        return None
