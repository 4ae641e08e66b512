"""Reading of run folders, also of runs that are unfinished or crashed.

If a resumed run logged an iteration again, the later values are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rl4lms_like.system.errors import RL4LMsLikeError
from rl4lms_like.system.regular_files import require_regular_file
from rl4lms_like.system.wording import shown
from rl4lms_like.tracking import run_folder
from rl4lms_like.tracking.sink import Epoch

TIME_IN_LOG = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
PREDICTIONS = re.compile(r"^epoch_(?P<epoch>\d+(\.\d+)?)_(?P<split>.+)_split_predictions\.json$")
LARGEST_COUNT = 2**53
"""Largest iteration or epoch: above it a float is no longer exact."""

LARGEST = 1e300
"""Largest other number; keeps the axes of charts finite."""

Item = TypeVar("Item")
METRICS = re.compile(r"^(?P<split>.+)_split_metrics\.jsonl$")


@dataclass(frozen=True)
class RunRecord:
    """Content of a run folder."""

    path: Path  # the folder
    config: Mapping[str, Any]  # the run's config as plain data
    iterations: list[dict[str, Any]]  # logged values of each iteration, with `iteration` and `timesteps`, in order
    evaluations: dict[str, dict[Epoch, dict[str, Any]]]  # split -> epoch, in order -> metric key -> corpus score
    predictions: dict[str, dict[Epoch, Path]]  # split -> epoch, in order -> file
    credit: list[dict[str, Any]]  # recorded values of single tokens, one mapping per line
    alarms: list[dict[str, Any]]  # alerts of the run doctor, in order
    began: datetime | None  # first time in the log
    ended: datetime | None  # last time in the log

    def setting(self, *path: str) -> Any:
        """Return a value of the config, or None if a key of `path` is missing."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def curve(self, key: str) -> list[tuple[float, float | None]]:
        """Return (iteration, value) of every iteration with the key; values that are not finite are None."""
        return [(line["iteration"], number(line[key])) for line in self.iterations if key in line]

    def values(self, key: str) -> list[float]:
        """Return the finite values of a key, in order."""
        return [value for _, value in self.curve(key) if value is not None]


def read_run(path: str | Path) -> RunRecord:
    """Read a run folder.

    Raises:
        RL4LMsLikeError: it is not a run folder, or one of its files was not written by a tracker.
    """
    path = Path(path)
    config = path / run_folder.CONFIG_FILE
    require_regular_file(config)
    if not config.is_file():
        raise RL4LMsLikeError(f"{path} is not a run folder: it has no {config.name}")

    # Both files have a line for each iteration, which are joined. A line without a number has that of its position.
    iterations: dict[int, dict[str, Any]] = {}
    for name in (run_folder.ROLLOUT_FILE, run_folder.TRAINING_FILE):
        for position, line in enumerate(lines_of(path / name), start=1):
            iteration = _count(line.setdefault("iteration", position), path / name)
            iterations.setdefault(iteration, {}).update(line)

    began, ended = _times(path / run_folder.LOG_FILE)
    return RunRecord(
        path=path,
        config=_object(_parsed(config.read_bytes(), config), config),
        iterations=[iterations[iteration] for iteration in sorted(iterations)],
        evaluations=_evaluations(path),
        predictions=_predictions(path),
        credit=lines_of(path / run_folder.CREDIT_FILE),
        alarms=lines_of(path / run_folder.ALARMS_FILE),
        began=began,
        ended=ended,
    )


def read_predictions(file: Path) -> list[dict[str, Any]]:
    """Read the texts of one evaluation; a file that is not a list of objects is an `RL4LMsLikeError`."""
    content = _parsed(file.read_bytes(), file)
    if not isinstance(content, list):
        raise RL4LMsLikeError(f"{file}: expected a list of objects, got {shown(content)}")
    return [_object(item, file) for item in content]


def dialogue_parts(turns: Any) -> list[tuple[bool, str]]:
    """Return the texts of a dialogue in order, each with whether the environment wrote it; empty without turns.

    Args:
        turns: objects with the text of a turn, and the answer: a text or messages.
    """
    parts = []
    for turn in turns or ():
        parts.append((False, str(turn["text"])))
        answer = turn.get("answer") or ""
        if not isinstance(answer, str):
            answer = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in answer)
        if answer:
            parts.append((True, answer))
    return parts


def spaced(items: Sequence[Item], n: int) -> Sequence[Item]:
    """Return the first, the last and evenly spaced items between them, at most `n` (2 or more)."""
    # Whole-number division, so that the last index is exactly the last item.
    last = len(items) - 1
    if last < n:
        return items
    return [items[step * last // (n - 1)] for step in range(n)]


@contextmanager
def written_by_a_run(file: Path) -> Iterator[None]:
    """Raise errors in values of a file as an `RL4LMsLikeError` that names the file."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise RL4LMsLikeError(f"{file} was not written by a run: {type(error).__name__}: {error}") from error


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None (`null`, the text `n/a`, NaN of other writers)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= LARGEST else None


def _count(value: Any, file: Path) -> Any:
    """Return a valid number of an iteration or epoch, or raise."""
    if number(value) is None or abs(value) > LARGEST_COUNT:
        raise RL4LMsLikeError(f"{file}: expected the number of an iteration or epoch, got {shown(value)}")
    return value


def _object(value: Any, file: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RL4LMsLikeError(f"{file}: expected a JSON object, got {shown(value)}")
    return value


def _evaluations(path: Path) -> dict[str, dict[Epoch, dict[str, Any]]]:
    splits: dict[str, dict[Epoch, dict[str, Any]]] = {}
    for file in path.iterdir():
        match = METRICS.match(file.name)
        if match is None:
            continue
        for line in lines_of(file):  # there may be none after a full disk
            scores = _object(line.get("metrics"), file)
            epoch = _count(line.get("epoch"), file)
            splits.setdefault(match["split"], {})[epoch] = scores
    return _in_order(splits)


def _predictions(path: Path) -> dict[str, dict[Epoch, Path]]:
    splits: dict[str, dict[Epoch, Path]] = {}
    for file in path.iterdir():
        match = PREDICTIONS.match(file.name)
        if match is None or not file.is_file():
            continue

        # Supervised runs evaluate within an epoch: `epoch_0.5_val_...`.
        epoch = _count(float(match["epoch"]), file)
        splits.setdefault(match["split"], {})[int(epoch) if epoch.is_integer() else epoch] = file
    return _in_order(splits)


def _in_order(splits: dict[str, dict[Epoch, Item]]) -> dict[str, dict[Epoch, Item]]:
    usual = ["train", "val", "test", "average_val", "average_test"]
    names = sorted(splits, key=lambda name: (usual.index(name) if name in usual else len(usual), name))
    return {name: dict(sorted(splits[name].items())) for name in names}


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file without an incomplete last line; other content is an `RL4LMsLikeError`."""
    # Without a line end the last line is incomplete: it is being written, or its process was killed.
    require_regular_file(file)
    whole_lines = file.read_bytes().rpartition(b"\n")[0] if file.is_file() else b""
    return [_object(_parsed(line, file), file) for line in whole_lines.split(b"\n") if line.strip()]


def _parsed(content: bytes, file: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RL4LMsLikeError(f"{file} is not JSON: {error}") from error


def _times(log: Path) -> tuple[datetime | None, datetime | None]:
    """Return the first and the last time in a log."""
    require_regular_file(log)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    times = TIME_IN_LOG.findall(text)
    try:
        return datetime.fromisoformat(times[0]), datetime.fromisoformat(times[-1])
    except (IndexError, ValueError):  # no times, or an invalid date
        return None, None
