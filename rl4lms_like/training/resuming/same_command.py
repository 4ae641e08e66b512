"""The same command again: goes on with the run that it began, or says why it begins another one.

    first      finished                              no
    first_2    unfinished, another config            no
    first_3    unfinished, the same config, nobody writes there, has a checkpoint    goes on with it
               the same, without a checkpoint, and ended before its first iteration  starts again in it
    first_4    there is none                         a new run, if none before fits

The lock is held from the look into a folder to the end of the run, so two processes never go on with the same one.
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
"""Differences that are shown of a config."""


@dataclass(frozen=True)
class Begun:
    """A run that the command goes on with.

    Args:
        folder: of the run.
        checkpoint: to resume from; None where the run ended before its first iteration, and starts again.
        lock: of the folder, held.
    """

    folder: Path
    checkpoint: Path | None
    lock: FileLock


def begun(config: AnyConfig, wanted: Path) -> tuple[Begun | None, list[str]]:
    """Looks for a run of this config among `wanted`, `wanted_2` ... that can go on.

    Args:
        config: of the command.
        wanted: the folder that it names.

    Returns:
        The first run that fits, and why those before it do not.

    Raises:
        CheckpointError: the run that fits has a damaged checkpoint; says which older one is intact.
        ConfigError: its `config.json` was edited by hand.
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
    raise AssertionError("unreachable: there is always one more")


def _unlike(config: AnyConfig, folder: Path) -> str | None:
    """Why the run in a folder is not the command's, as far as that is seen without holding it."""
    if (folder / FINISHED_FILE).exists():
        return "it is finished"
    try:
        before = parse_config(own_config(folder), source=str(folder / CONFIG_FILE))
    except (CheckpointError, ConfigError):
        return f"its {CONFIG_FILE} cannot be read"
    now = to_json(masked(config.to_dict()))
    differences = other_computations(to_json(before.to_dict()), now)
    return f"its config is another one: {_in_short(differences, now)}" if differences else None


def _in_short(differences: Sequence[Difference], now: Mapping[str, Any]) -> str:
    said = []
    for path, old, new in differences[:N_SHOWN]:
        schedule = follows_length(path, now)
        why = f" (the learning rate is {schedule} over the run)" if schedule else ""
        said.append(f"{path} is {shown(old)} there, {shown(new)} here{why}")
    more = len(differences) - N_SHOWN
    return "; ".join([*said, f"and {more} more"] if more > 0 else said)


def _goes_on(config: AnyConfig, folder: Path, lock: FileLock) -> Begun | str:
    """The run, or why it cannot go on; its lock is held."""
    if (folder / FINISHED_FILE).exists():  # meanwhile
        return "it is finished"
    put_names_back(folder)
    try:
        checkpoint = newest_checkpoint(folder)
    except CheckpointError:
        left_out = skipped(folder / "checkpoints")
        return Begun(folder, None, lock) if is_untrained(folder) else f"it has no checkpoint to go on from{left_out}"
    state = checked(checkpoint, "; --new starts another run")
    refuse_edited(folder, state, own_config(folder))
    if mistake := behind_already(config.to_dict(), state, checkpoint):
        return f"{mistake.path} is {mistake.message}"
    return Begun(folder, checkpoint, lock)
