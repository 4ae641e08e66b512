"""Search for an unfinished run of the same command, so that repeating a command resumes its run.

    first      finished                              skipped
    first_2    unfinished, another config            skipped
    first_3    unfinished, the same config, not locked, has a checkpoint             resumed
               the same, without a checkpoint, ended before its first iteration      restarted in this folder
    first_4    does not exist                        a new run, if no earlier folder matches

The lock is held from the first check of a folder to the end of the run, so two processes never resume the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from rl4lms_like.core.errors import CheckpointError, ConfigError
from rl4lms_like.core.secrets import masked
from rl4lms_like.core.wording import shown
from rl4lms_like.tracking.run_folder import CONFIG_FILE, FINISHED_FILE, is_untrained, numbered, to_json, try_hold
from rl4lms_like.training.config.run_config import AnyConfig, parse_config
from rl4lms_like.training.resuming.checkpoints import newest_checkpoint, put_names_back, skipped
from rl4lms_like.training.resuming.resume import (
    Difference,
    behind_already,
    checked,
    follows_length,
    other_computations,
    own_config,
    refuse_edited,
)

N_SHOWN = 3
"""Largest number of config differences in a message."""


@dataclass(frozen=True)
class Begun:
    """Unfinished run that the command resumes.

    Args:
        folder: folder of the run.
        checkpoint: checkpoint to resume from; None if the run ended before its first iteration and is restarted.
        lock: lock of the folder, already acquired.
    """

    folder: Path
    checkpoint: Path | None
    lock: FileLock


def begun(config: AnyConfig, wanted: Path) -> tuple[Begun | None, list[str]]:
    """Find the first run of this config in `wanted`, `wanted_2` ... that can be resumed.

    Args:
        config: config of the command.
        wanted: the folder that the command names.

    Returns:
        The first matching run, and for each run before it the reason why it does not match.

    Raises:
        CheckpointError: the matching run has a damaged checkpoint. The message names the newest older checkpoint that
            is intact.
        ConfigError: the `config.json` of the matching run was edited by hand.
    """
    reasons: list[str] = []
    for folder in numbered(wanted):
        if not (folder / CONFIG_FILE).is_file():
            return None, reasons
        reason = _unlike(config, folder)
        lock = None if reason else try_hold(folder)
        if not reason and lock is None:
            reason = "another process is writing to it"
        if lock is not None:
            try:
                found = _goes_on(config, folder, lock)
            except BaseException:
                lock.release()
                raise
            if isinstance(found, Begun):
                return found, reasons
            lock.release()
            reason = found
        reasons.append(f"{folder}: {reason}")
    raise AssertionError("unreachable: numbered() is endless")


def _unlike(config: AnyConfig, folder: Path) -> str | None:
    """Return why the run in a folder does not match, or None. This check needs no lock."""
    if (folder / FINISHED_FILE).exists():
        return "it is finished"
    try:
        before = parse_config(own_config(folder), source=str(folder / CONFIG_FILE))
    except (CheckpointError, ConfigError):
        return f"its {CONFIG_FILE} cannot be read"
    now = to_json(masked(config.to_dict()))
    differences = other_computations(to_json(before.to_dict()), now)
    return f"its config differs: {_in_short(differences, now)}" if differences else None


def _in_short(differences: Sequence[Difference], now: Mapping[str, Any]) -> str:
    said = []
    for path, old, new in differences[:N_SHOWN]:
        schedule = follows_length(path, now)
        why = f" (the learning rate is {schedule} over the run)" if schedule else ""
        said.append(f"{path} is {shown(old)} there, {shown(new)} here{why}")
    more = len(differences) - N_SHOWN
    return "; ".join([*said, f"and {more} more"] if more > 0 else said)


def _goes_on(config: AnyConfig, folder: Path, lock: FileLock) -> Begun | str:
    """Return the run, or the reason why it cannot be resumed. The caller holds its lock."""
    if (folder / FINISHED_FILE).exists():  # finished since the check without the lock
        return "it is finished"
    put_names_back(folder)
    try:
        checkpoint = newest_checkpoint(folder)
    except CheckpointError:
        left_out = skipped(folder / "checkpoints")
        return Begun(folder, None, lock) if is_untrained(folder) else f"it has no checkpoint to resume from{left_out}"
    state = checked(checkpoint, "; --new starts a new run")
    refuse_edited(folder, state, own_config(folder))
    if mistake := behind_already(config.to_dict(), state, checkpoint):
        return f"{mistake.path} is {mistake.message}"
    return Begun(folder, checkpoint, lock)
