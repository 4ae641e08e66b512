"""Changes of a run that affect its results and that its user accepted on resuming: `accepted_changes.json`.

    [{"iteration": 20, "path": "alg.args.ent_coef", "old": 0.0, "new": 0.01}, ...]

A run computes what its config says, so what affects results cannot change on resuming, unless the user says so. From
then on `config.json` has the new value, and this file says when it changed. A checkpoint has the config under which it
was written: at each resumption the list is completed by the differences between both. So it says what happened also if
a run resumes from an older checkpoint, or was killed before a newer one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl4lms_like.system.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.system.regular_files import read_json
from rl4lms_like.system.schema import at
from rl4lms_like.tracking.run_folder import CHANGES_FILE, CONFIG_FILE, to_json, write_whole


@dataclass(frozen=True)
class AcceptedChange:
    """Value of a run that its user has changed.

    Args:
        iteration: number of completed iterations (in supervised and preference runs steps) when it changed.
        path: config path of what changed, such as `alg.args.ent_coef` or `reward_fn.args.function`.
        old: value before, as JSON data.
        new: value from then on, as JSON data.
    """

    iteration: int
    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path} is {self.new!r} instead of {self.old!r} after {self.iteration}"


def read_changes(run_folder: Path) -> tuple[AcceptedChange, ...]:
    """Return the accepted changes of the run in a folder, oldest first; none without the file.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = run_folder / CHANGES_FILE
    if not file.exists():
        return ()
    try:
        entries = read_json(file)
        return tuple(AcceptedChange(**entry) for entry in entries)
    except (OSError, ValueError, TypeError, RL4LMsLikeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error


def record_changes(run_folder: Path, changes: Sequence[AcceptedChange]) -> None:
    """Write the accepted changes of the run in a folder, which the caller has locked; no changes need no file."""
    file = run_folder / CHANGES_FILE
    if changes or file.exists():
        entries = [to_json(dataclasses.asdict(change)) for change in changes]
        write_whole(file, json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def undone_on_failure(run_folder: Path) -> Iterator[None]:
    """Write the config and the accepted changes of a run back if the block, which loads its checkpoint, fails."""
    contents = {}
    for name in (CONFIG_FILE, CHANGES_FILE):
        file = run_folder / name
        contents[file] = file.read_text(encoding="utf-8") if file.exists() else None

    def undo() -> None:
        for file, content in contents.items():
            if content is None:
                file.unlink(missing_ok=True)
            else:
                write_whole(file, content)

    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()


def is_recorded(path: str, new: Any, recorded: Sequence[AcceptedChange]) -> bool:
    """Return whether the last recorded change of a config path has led to the value `new`."""
    values = [change.new for change in recorded if change.path == path]
    return bool(values) and values[-1] == to_json(new)


def is_original(path: str, value: Any, recorded: Sequence[AcceptedChange]) -> bool:
    """Return whether a config path had this value before its first recorded change."""
    values = [change.old for change in recorded if change.path == path]
    return bool(values) and values[0] == to_json(value)


def is_covered(path: str, accepted: Collection[str]) -> bool:
    """Return whether a config path, or a block that contains it, is among the accepted ones."""
    return any(path == block or path.startswith(f"{block}.") for block in accepted)


def changes_until(
    n_done: int, config: Mapping[str, Any], recorded: Sequence[AcceptedChange]
) -> tuple[AcceptedChange, ...]:
    """Return the recorded changes that are part of a checkpoint after `n_done` iterations with this config."""
    changes = []
    for change in recorded:
        # A change is recorded under the number of the checkpoint at which it was made. That checkpoint was written
        # before it; another one of the same number, of a run that was interrupted soon after, was written later.
        is_earlier = change.iteration < n_done
        if is_earlier or (change.iteration == n_done and to_json(at(config, change.path)) == change.new):
            changes.append(change)
    return tuple(changes)
