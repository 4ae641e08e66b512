"""Checkpoints on disk: all of it or nothing, and what is damaged says so.

    checkpoints/iteration_00020/
        config.json  model.safetensors  tokenizer ...     the language model, as `from_pretrained` reads it
        training_state.safetensors                        trained weights, optimizer, random states
        training_state.json                               counters, coefficients, where random draws stand
        manifest.json                                     size and SHA-256 of every file; written last

A checkpoint is written into a folder of another name, flushed and renamed. The newest two keep their training state,
older ones their model, unless `keep_last` says how many stay. No pickle is written or read. `checkpoints` may be a
link; then nothing is replaced or deleted but the run's own (`ownership.py`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.disk import flush, reason, share, take_away
from rl4lms_like.core.errors import CheckpointError
from rl4lms_like.training.resuming.ownership import MANIFEST as MANIFEST
from rl4lms_like.training.resuming.ownership import is_own, mark_in

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2
OLDER_FORMATS = {1: "version 0.1.0, whose updates normalize advantages and clip gradients in another way"}
N_WITH_STATE = 2
"""How many checkpoints, the newest ones, keep what a run goes on from."""

STATE, TENSORS = "training_state.json", "training_state.safetensors"
ITERATION, STEP = "iteration_{:05d}", "checkpoint-{}"
"""Names of checkpoints: of RL runs, and of supervised ones, as transformers' Trainer calls them."""
INTERRUPTED = "interrupted_{:05d}"
"""Of a run that ended early: newer than the checkpoint of its number, gone once there is a later one."""

_NUMBERED = re.compile(r"(?:iteration_|checkpoint-)([0-9]{1,18})")
_ENDED_EARLY = re.compile(r"interrupted_([0-9]{1,18})")
_PARTIAL, _REPLACED = ".partial", ".replaced"
_LEFT = re.compile(
    rf"(?P<name>{_NUMBERED.pattern}|{_ENDED_EARLY.pattern})(?:\.(?P<mark>[0-9a-f]{{16}}))?\.(?:partial|replaced)"
)
"""Of a process that was killed while it wrote a checkpoint."""

_VERSIONS = ("rl4lms-like", "torch", "transformers", "stable-baselines3", "numpy")


@dataclass(frozen=True)
class TrainingState:
    """What a run goes on from.

    Args:
        numbers: JSON's types only.
        tensors: by name.
    """

    numbers: dict[str, Any]
    tensors: dict[str, Tensor]


def write_checkpoint(
    base: Path,
    iteration: int,
    state: TrainingState,
    save_model: Callable[[Path], Any],
    *,
    name: str = ITERATION,
    keep: int | None = None,
) -> Path:
    """Writes `base/iteration_<iteration>` and takes away what older ones need not keep.

    Args:
        base: the run's `checkpoints` folder.
        iteration: how many are completed.
        state: what the run goes on from.
        save_model: writes model and tokenizer to a folder.
        name: of the folder.
        keep: so many checkpoints stay, the newest ones; None: the models of all, the training states of two.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the folder cannot be written; what was there before is left as it was.
    """
    folder = base / name.format(iteration)

    def write(partial: Path) -> None:
        save_model(partial)
        _write_tensors(state.tensors, partial / TENSORS)
        _write_json(state.numbers, partial / STATE)
        files = {path.relative_to(partial).as_posix(): path for path in sorted(partial.rglob("*")) if path.is_file()}
        manifest = {
            "format": FORMAT,
            "iteration": iteration,
            "versions": {name: _version(name) for name in _VERSIONS},
            "files": {name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for name, path in files.items()},
        }
        if mark := mark_in(base):
            manifest["run"] = mark
        _write_json(manifest, partial / MANIFEST)

    write_folder(folder, write)
    forget_interrupted(base, but=folder)
    if name == INTERRUPTED:
        return folder
    if keep is None:
        for older in [path for path in checkpoints_in(base) if (path / MANIFEST).is_file()][:-N_WITH_STATE]:
            if is_own(older):
                _take_state_away(older)
    else:
        remove_older(base, iteration, keep)
    return folder


def write_folder(folder: Path, write: Callable[[Path], Any]) -> Path:
    """Writes a folder as a whole: under another name, flushed to the disk, renamed. A failure leaves nothing behind.

    Args:
        folder: where to; what is there is replaced.
        write: writes the files into the folder that it is given.

    Raises:
        FileExistsError: what is there lies behind a link and is not known to be of this run.
        OSError: the folder cannot be written.
    """
    mark = f".{own}" if (own := mark_in(folder.parent)) else ""
    if folder.exists() and not is_own(folder):
        said = "it lies behind a link and this run did not write it; it is kept: remove it, or change the link"
        raise FileExistsError(errno.EEXIST, said, str(folder))
    partial, before = (folder.with_name(f"{folder.name}{mark}{end}") for end in (_PARTIAL, _REPLACED))
    try:
        take_away(partial)
        write(partial)
        share(partial)
        for path in (*sorted(partial.rglob("*")), partial):
            flush(path)
        if folder.exists():  # it is not taken away before the other one stands in its place
            take_away(before)
            os.replace(folder, before)
        os.replace(partial, folder)
    except BaseException:
        if before.exists() and not folder.exists():
            os.replace(before, folder)
        with suppress(OSError):  # a full disk would stay full
            take_away(partial)
        raise
    flush(folder.parent)
    with suppress(OSError):
        take_away(before)
    return folder


def read_checkpoint(folder: Path) -> TrainingState:
    """The training state of a checkpoint, if every file is what its manifest says.

    Raises:
        CheckpointError: it is no checkpoint, damaged, or of another format; says which file and how.
    """
    from safetensors.torch import load_file

    try:
        manifest = _read_manifest(folder)
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{folder}: {name} is missing")
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{folder}: {name} has {size} bytes instead of {expected['bytes']}")
            if _digest(path) != expected["sha256"]:
                raise CheckpointError(f"{folder}: {name} is not what was written (its SHA-256 differs)")
        state = TrainingState(json.loads((folder / STATE).read_text(encoding="utf-8")), load_file(folder / TENSORS))
        iteration = state.numbers["trainer"]["iteration"]
        if type(iteration) is not int or iteration < 0 or iteration != manifest["iteration"]:
            raise CheckpointError(f"{folder}: {STATE} and {MANIFEST} are of different iterations")
    except CheckpointError:
        raise
    except Exception as error:  # whatever bytes can do to those who read them
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error
    return state


def newest_checkpoint(run_folder: Path) -> Path:
    """The newest checkpoint of a run that has a training state.

    Raises:
        CheckpointError: there is none.
    """
    found = _with_state(run_folder / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{run_folder} has no checkpoint to go on from; one is written every train_evaluation.save_every iterations"
            f", of a supervised run as alg.training_args.save_strategy says{skipped(run_folder / 'checkpoints')}"
        )
    return found[-1]


def skipped(base: Path, since: int = -1) -> str:
    """Return which checkpoints after `since` iterations or steps cannot be resumed, and why."""
    names = [p.name for p in checkpoints_in(base) if not (p / MANIFEST).is_file() and _number(p) > since]  # type: ignore[operator]
    why = f"no {MANIFEST}: the model alone, or a checkpoint that was not written to its end or was changed"
    return f"; skipped: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} ({why})" if names else ""


def put_names_back(run_folder: Path) -> None:
    """Gives checkpoints their names again that a process was about to replace when it was killed.

    Only for who holds the run's lock: a process that lives is through with it in a moment.
    """
    base = run_folder / "checkpoints"
    for left in base.glob(f"*{_REPLACED}"):
        found = _left(left)
        if found is not None and left.is_dir() and not (folder := base / found["name"]).exists():
            os.replace(left, folder)


def older_intact(checkpoint: Path, check: Callable[[Path], Any] = read_checkpoint) -> Path | None:
    """The newest checkpoint before this one that `check` raises no `CheckpointError` for."""
    own = _place(checkpoint)
    for other in reversed(_with_state(checkpoint.parent)):
        if own is None or _place(other) < own:  # type: ignore[operator]
            try:
                check(other)
            except CheckpointError:
                continue
            return other
    return None


def forget_later(base: Path, iteration: int, keep: int | None = None, *, interrupted: bool = False) -> None:
    """Takes the training state of later checkpoints away: a run that goes on from here writes its own.

    Of those up to here, so many stay as `write_checkpoint` keeps: a process that was killed had no time to remove them.
    What it was just writing, or taking away, is removed likewise. `interrupted` says that the run goes on from what it
    saved when it ended early.

    Raises:
        CheckpointError: there is a later one that the run did not write, and nothing was removed; or one cannot be.
    """
    later = [path for path in _with_state(base) if _place(path) > (iteration, interrupted)]  # type: ignore[operator]
    if foreign := next((path for path in later if not is_own(path)), None):
        raise CheckpointError(
            f"{foreign} is later than where this run resumes. It lies behind a link and this run did not write it, so "
            f"it is kept: resume from it, remove it, or point the link to another folder"
        )
    try:
        for left in [path for path in base.glob("*") if path.is_dir()]:
            if _left(left):
                take_away(left)
            elif _place(left) and not (left / MANIFEST).is_file() and is_own(left):
                _take_state_away(left)
        for path in later:
            take_away(path) if path.is_symlink() else _take_state_away(path)
        if keep is not None:
            remove_older(base, iteration, keep)
    except OSError as error:
        raise CheckpointError(f"cannot remove what is later than the checkpoint: {reason(error)}") from error


def ended_early(checkpoint: Path) -> bool:
    """Whether it is one of a run that ended early."""
    return _ENDED_EARLY.fullmatch(checkpoint.name) is not None


def forget_interrupted(base: Path, but: Path | None = None) -> None:
    """Removes what a run that ended early had saved, `but` one."""
    for path in base.glob("*"):
        if path != but and ended_early(path) and path.is_dir():
            remove(path)


def remove_older(base: Path, iteration: int, keep: int, spare: Collection[Path] = ()) -> None:
    """Removes checkpoints whole, the oldest first, until so many are left.

    Args:
        base: the run's `checkpoints` folder.
        iteration: where the run is; later checkpoints, left of an earlier attempt, are not looked at.
        keep: how many stay; the newest always does.
        spare: those that stay however old they are; they count.
    """
    found = [path for path in checkpoints_in(base) if _number(path) <= iteration and is_own(path)]  # type: ignore[operator]
    stay = {*found[-1:], *(path for path in found if path in spare)}
    for path in [path for path in found if path not in stay][: max(len(found) - max(keep, len(stay)), 0)]:
        remove(path)


def checkpoints_in(base: Path) -> list[Path]:
    """The finished checkpoints, oldest first, without those of runs that ended early.

    Folders of other names, a user's copies for instance, are none.
    """
    return sorted((path for path in base.glob("*") if _number(path) is not None and path.is_dir()), key=_number)  # type: ignore[arg-type]


def _with_state(base: Path) -> list[Path]:
    """All that a run can go on from, oldest first."""
    return sorted((path for path in base.glob("*") if _place(path) and (path / MANIFEST).is_file()), key=_place)  # type: ignore[arg-type]


def _place(checkpoint: Path) -> tuple[int, bool] | None:
    """Where it stands among others: its number, and whether it is of a run that ended early in the iteration after."""
    found = _ENDED_EARLY.fullmatch(checkpoint.name)
    if found is not None:
        return int(found[1]), True
    number = _number(checkpoint)
    return None if number is None else (number, False)


def _number(checkpoint: Path) -> int | None:
    found = _NUMBERED.fullmatch(checkpoint.name)
    return None if found is None else int(found[1])


def _left(path: Path) -> re.Match[str] | None:
    """The name of a folder that a killed process of this run left."""
    found, mark = _LEFT.fullmatch(path.name), mark_in(path.parent)
    return found if found is not None and (not mark or found["mark"] == mark) else None


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint, or the link in its place; one that is not the run's own stays."""
    if not is_own(checkpoint):
        return
    if not checkpoint.is_symlink():
        (checkpoint / MANIFEST).unlink(missing_ok=True)  # half of it must not pass for a checkpoint
    take_away(checkpoint)


def _take_state_away(checkpoint: Path) -> None:
    """Leaves the model, and all of what a link leads to, which may be somebody else's."""
    for name in (MANIFEST, STATE, TENSORS) if not checkpoint.is_symlink() else ():
        (checkpoint / name).unlink(missing_ok=True)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        names = set(manifest["files"])
        known = manifest["format"]
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
            raise CheckpointError(f"{folder}: {MANIFEST} names files outside the checkpoint")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is no checkpoint that a run can go on from") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if type(known) is not int or known != FORMAT or not {STATE, TENSORS} <= names:
        way_out = "resume the run with that version, or start a new one from this model (alg.policy.args.model_name)"
        if known in OLDER_FORMATS:
            raise CheckpointError(f"{folder}: written by {OLDER_FORMATS[known]}: {way_out}")
        raise CheckpointError(f"{folder}: written in format {known!r}; this version reads format {FORMAT}")
    return dict(manifest)


def _write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    packed = {}
    for name, tensor in tensors.items():
        part = tensor.detach().cpu().contiguous()
        if part.untyped_storage().data_ptr() in seen:  # safetensors writes no memory twice
            part = part.clone()
        seen.add(part.untyped_storage().data_ptr())
        packed[name] = part
    try:
        save_file(packed, file)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error


def _write_json(value: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # a copy that was not installed
        return None
