"""Checkpoints on disk: written atomically, verified when read.

    checkpoints/iteration_00020/
        config.json  model.safetensors  tokenizer ...     the language model, as `from_pretrained` reads it
        training_state.safetensors                        trained weights, optimizer, random states
        training_state-00001-of-00002.safetensors ...     with `distributed.checkpoint: split`, each process's rows of
                                                          weights and optimizer, which the file above then lacks
        training_state.json                               counters, coefficients, positions of random streams
        manifest.json                                     size and SHA-256 of every file; written last

A checkpoint is written to a temporary folder, flushed and renamed. By default, the newest two checkpoints keep their
training state and older ones only the model; `keep_last` sets how many are kept. Pickle is neither written nor read.

A run may delete every checkpoint in its own folder, but behind a link only those with its mark:

    run/checkpoints -> /scratch/a/
        /scratch/a/iteration_00020                    the run's own if manifest.json has its mark as `run`
        /scratch/a/iteration_00030.<mark>.partial     the run's own
        /scratch/a/iteration_00030.partial            another run's
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
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl4lms_like.system.disk import flush, reason, remove_path, share_permissions
from rl4lms_like.system.errors import CheckpointError, RL4LMsLikeError, installed_version
from rl4lms_like.system.regular_files import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from rl4lms_like.system.ranks import Ranks

LARGEST_STATE = 2**31
"""Bytes of a training state's numbers, with the texts of what is generated ahead."""
FORMAT = 2
OLDER_FORMATS = {1: "version 0.1.0, whose updates normalize advantages and clip gradients in another way"}
N_WITH_STATE = 2
"""Number of newest checkpoints that keep their training state."""

FOLDER = "checkpoints"
"""Name of the folder that holds the checkpoints. Users may replace it by a link to another disk."""
MANIFEST = "manifest.json"
STATE = "training_state.json"
TENSORS = "training_state.safetensors"
ROWS = "training_state-{:05d}-of-{:05d}.safetensors"
ALL_ROWS = "training_state-*-of-*.safetensors"
"""Name of the file with the rows of one of several processes, and the pattern of all of them."""
ITERATION = "iteration_{:05d}"
STEP = "checkpoint-{}"
"""Names of checkpoint folders of RL runs and of supervised runs. The latter are those of transformers' Trainer."""
INTERRUPTED = "interrupted_{:05d}"
"""Checkpoint of a run that ended early. It is newer than `iteration_<n>` and removed once there is a later one."""

_WEIGHTS = ("policy.", "model.", "objective.", "optimizer.")
"""Beginnings of the names of weights and moments."""
_NAME = re.compile(
    r"(?:iteration_|checkpoint-|(?P<early>interrupted_))(?P<number>[0-9]{1,18})"
    r"(?P<temporary>(?:\.(?P<mark>[0-9a-f]{16}))?\.(?:partial|replaced))?"  # temporary folders of a killed process
)
_VERSIONS = ("rl4lms-like", "torch", "transformers", "stable-baselines3", "numpy")


FileDigest = dict[str, Any]
"""Entry of a manifest: `bytes` and `sha256` of a file."""
RowsWriter = Callable[[Path], Mapping[str, FileDigest]]
"""Function that writes the rows of split tensors to a folder, and returns digests of the files by name."""


@dataclass(frozen=True)
class TrainingState:
    """State from which a run resumes.

    Args:
        numbers: in types that JSON supports.
        tensors: by names with prefixes for their owners: `policy.`, `optimizer.`, `random.`, `update.`, `ahead.`.
            Weights and moments of a checkpoint are not read yet: `sharding.like` reads them, of split ones the rows of
            this process.
    """

    numbers: dict[str, Any]
    tensors: dict[str, Tensor]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with the prefix, named without it."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def write_checkpoint(
    base: Path,
    iteration: int,
    state: TrainingState,
    save_model: Callable[[Path], Any],
    *,
    name: str = ITERATION,
    keep: int | None = None,
    write_rows: RowsWriter | None = None,
) -> Path:
    """Write `base/iteration_<iteration>`, prune older checkpoints, and return the checkpoint's folder.

    Args:
        base: the run's `checkpoints` folder.
        iteration: number of completed iterations.
        state: state from which the run can resume.
        save_model: writes model and tokenizer to a folder.
        name: template of the folder's name.
        keep: number of newest checkpoints to keep; None: keep the models of all and the training states of two.
        write_rows: lets all processes write their rows of split tensors; None: this one gathers and writes them.

    Raises:
        OSError: the folder cannot be written; the previous content is unchanged.
    """
    from rl4lms_like.policies.sharding import is_split

    folder = base / name.format(iteration)

    def write(partial: Path) -> None:
        save_model(partial)
        tensors = state.tensors
        files: dict[str, FileDigest] = {}
        if write_rows is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if not is_split(tensor)}
            files = dict(write_rows(partial))
        write_tensors(tensors, partial / TENSORS)
        _write_json(state.numbers, partial / STATE)

        # The manifest comes last: a folder without one is not read as a checkpoint.
        for path in sorted(partial.rglob("*")):
            name_in_folder = path.relative_to(partial).as_posix()
            if path.is_file() and name_in_folder not in files:
                files[name_in_folder] = file_digest(path)
        manifest = {
            "format": FORMAT,
            "iteration": iteration,
            "versions": {name: installed_version(name) for name in _VERSIONS},
            "files": files,
        }
        if mark := mark_in(base):
            manifest["run"] = mark
        _write_json(manifest, partial / MANIFEST)

    write_folder(folder, write)

    # Older checkpoints go only once the new one is complete on the disk. The one of an interrupted run replaces none:
    # the resumed run removes it, and prunes the others when it writes its next one.
    delete_interrupted(base, but=folder)
    if name == INTERRUPTED:
        return folder
    if keep is not None:
        remove_older(base, iteration, keep)
        return folder
    resumable = [path for path in _with_state(base) if not ended_early(path)]
    for older in resumable[:-N_WITH_STATE]:
        if is_own(older):
            _remove_state(older)
    return folder


def write_rows_of_processes(
    tensors: Mapping[str, Tensor], ranks: Ranks, folder: Path | None = None
) -> dict[str, FileDigest]:
    """Write the rows of split tensors that each process has; all processes call it together.

    Args:
        tensors: by name; those that are not split are left out.
        ranks: the processes.
        folder: the checkpoint's folder; the main process names it.

    Returns:
        Digests of the files of all processes.

    Raises:
        OSError: one of the processes cannot write its file; raised in the main process only, which others wait for.
    """
    from rl4lms_like.policies.sharding import is_split, own_part

    named = ranks.from_main(lambda: str(folder))
    path = Path(named) / ROWS.format(ranks.rank + 1, ranks.size)
    digest: FileDigest | OSError
    try:
        write_tensors({name: own_part(tensor) for name, tensor in tensors.items() if is_split(tensor)}, path)
        flush(path)  # by the machine that wrote it
        digest = file_digest(path)
    except OSError as error:
        digest = error

    digests: dict[str, FileDigest] = {}
    for rank, digest_of_rank in enumerate(ranks.gather(digest), 1):
        if not isinstance(digest_of_rank, OSError):
            digests[ROWS.format(rank, ranks.size)] = digest_of_rank
        elif ranks.is_main:
            raise digest_of_rank
    return digests


def write_folder(folder: Path, write: Callable[[Path], Any]) -> Path:
    """Write a folder atomically: under a temporary name, flushed to the disk, then renamed. A failure leaves no files.

    An existing folder is replaced.

    Raises:
        FileExistsError: the existing folder is behind a symbolic link and not known to belong to this run.
        OSError: the folder cannot be written.
    """
    if folder.exists() and not is_own(folder):
        message = "it is behind a link and was not written by this run, so it is kept; remove it or change the link"
        raise FileExistsError(errno.EEXIST, message, str(folder))

    # Behind a link, several runs may write to the same folder: the mark keeps their temporary folders apart.
    mark = mark_in(folder.parent)
    prefix = f"{folder.name}.{mark}" if mark else folder.name
    partial = folder.with_name(f"{prefix}.partial")
    before = folder.with_name(f"{prefix}.replaced")
    try:
        remove_path(partial)
        write(partial)
        share_permissions(partial)

        # On the disk before it is renamed: after a power failure, a renamed folder must not have empty files.
        for path in sorted(partial.rglob("*")):
            flush(path)
        flush(partial)

        # An existing folder is deleted only after the new one has replaced it.
        if folder.exists():
            remove_path(before)
            os.replace(folder, before)
        os.replace(partial, folder)
    except BaseException:
        if before.exists() and not folder.exists():
            os.replace(before, folder)
        with suppress(OSError):  # the disk may still be full
            remove_path(partial)
        raise

    flush(folder.parent)
    with suppress(OSError):
        remove_path(before)
    return folder


def read_checkpoint(folder: Path) -> TrainingState:
    """Read the training state of a checkpoint after checking every file against its manifest.

    Raises:
        CheckpointError: the folder is not a checkpoint, is damaged, or has another format. The message names the file
            and the problem.
    """
    from rl4lms_like.policies.unread_weights import tensors_in_parts, tensors_without_matrices

    try:
        # Every file, also the model's: a checkpoint with a changed model would resume with other weights.
        manifest = _read_manifest(folder)
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{folder}: {name} is missing")
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(f"{folder}: {name} has {size} bytes instead of {expected['bytes']}")
            if _digest(path) != expected["sha256"]:
                raise CheckpointError(f"{folder}: {name} was changed after it was written (its SHA-256 differs)")

        numbers = read_json(folder / STATE, limit=LARGEST_STATE)
        tensors = tensors_without_matrices(folder / TENSORS, _WEIGHTS)
        if parts := sorted(folder / name for name in manifest["files"] if fnmatch(name, ALL_ROWS)):
            tensors |= tensors_in_parts(parts)
        state = TrainingState(numbers, tensors)
        if numbers["trainer"]["iteration"] != manifest["iteration"]:
            raise CheckpointError(f"{folder}: {STATE} and {MANIFEST} belong to different iterations")
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes can cause any exception while they are parsed
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error
    return state


def newest_checkpoint(run_folder: Path) -> Path:
    """Return the newest checkpoint of a run that has a training state.

    Raises:
        CheckpointError: there is none.
    """
    resumable = _with_state(run_folder / FOLDER)
    if resumable:
        return resumable[-1]
    raise CheckpointError(
        f"{run_folder} has no checkpoint to resume from; it is saved every train_evaluation.save_every iterations"
        f", in supervised runs according to alg.training_args.save_strategy{skipped(run_folder / FOLDER)}"
    )


def skipped(base: Path, since: int = -1) -> str:
    """Return the names of checkpoints after `since` iterations or steps that cannot be resumed, and the reason."""
    names = []
    for path in checkpoints_in(base):
        if _sort_key(path) > (since, True) and not (path / MANIFEST).is_file():
            names.append(path.name)
    if not names:
        return ""
    why = f"no {MANIFEST}: they hold only the model, are incomplete or were changed"
    return f"; skipped: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} ({why})"


def put_names_back(run_folder: Path) -> None:
    """Restore the names of checkpoints that a killed process was about to replace.

    The caller must hold the run's lock, because a running process completes the replacement itself.
    """
    for replaced in (run_folder / FOLDER).glob("*.replaced"):
        folder = replaced.with_name(replaced.name.partition(".")[0])
        if replaced.is_dir() and _is_temporary(replaced) and not folder.exists():
            os.replace(replaced, folder)


def older_intact(checkpoint: Path, check: Callable[[Path], Any] = read_checkpoint) -> Path | None:
    """Return the newest earlier checkpoint that passes `check`, that is, for which it raises no `CheckpointError`."""
    # A checkpoint that the user has renamed has no key: then all that have one may be earlier.
    key = _sort_key(checkpoint)
    for other in reversed(_with_state(checkpoint.parent)):
        if not key or _sort_key(other) < key:
            with suppress(CheckpointError):
                check(other)
                return other
    return None


def delete_later(base: Path, iteration: int, keep: int | None = None, *, interrupted: bool = False) -> None:
    """Delete the training state of checkpoints later than the one from which the run resumes.

    That is `interrupted_<iteration>` if `interrupted`, else `iteration_<iteration>`. Earlier checkpoints are pruned to
    `keep`, and incomplete folders are removed, because a killed process may not have done so.

    Raises:
        CheckpointError: a later checkpoint was not written by this run, so that nothing was removed; or one cannot be
            removed.
    """
    later = [path for path in _with_state(base) if _sort_key(path) > (iteration, interrupted)]
    for path in later:
        if not is_own(path):
            raise CheckpointError(
                f"{path} is later than the checkpoint to resume from. It is behind a link and was not written by this "
                f"run, so it is kept: resume from it, remove it, or point the link to another folder"
            )

    try:
        # What a killed process has left: temporary folders, and checkpoints whose removal it had begun.
        for path in [path for path in base.glob("*") if path.is_dir()]:
            if _is_temporary(path):
                remove_path(path)
            elif _sort_key(path) and not (path / MANIFEST).is_file() and is_own(path):
                _remove_state(path)

        # Their models stay, but nothing must resume from a state that this run will not reach again.
        for path in later:
            if path.is_symlink():
                remove_path(path)
            else:
                _remove_state(path)
        if keep is not None:
            remove_older(base, iteration, keep)
    except OSError as error:
        raise CheckpointError(f"cannot remove files later than the checkpoint: {reason(error)}") from error


def delete_interrupted(base: Path, but: Path | None = None) -> None:
    """Remove all checkpoints saved when the run ended early, except `but`."""
    for path in all_in(base):
        if path != but and ended_early(path):
            remove(path)


def remove_older(base: Path, iteration: int, keep: int, spare: Collection[Path] = ()) -> None:
    """Remove the oldest checkpoints, including their models, until `keep` are left.

    The newest is always kept, and so are those in `spare`, which count towards `keep`. Checkpoints later than the
    current iteration are those of an earlier attempt and are ignored.
    """
    own_checkpoints = []
    for path in checkpoints_in(base):
        if _sort_key(path) <= (iteration, True) and is_own(path):
            own_checkpoints.append(path)

    newest = own_checkpoints[-1:]
    removable = [path for path in own_checkpoints if path not in newest and path not in spare]
    n_staying = len(own_checkpoints) - len(removable)
    n_removed = len(own_checkpoints) - max(keep, n_staying)
    for path in removable[: max(n_removed, 0)]:
        remove(path)


def checkpoints_in(base: Path) -> list[Path]:
    """Return the checkpoints, oldest first, without those saved when the run ended early.

    Folders with other names, such as a user's copies, are ignored.
    """
    return [path for path in all_in(base) if not ended_early(path)]


def ended_early(checkpoint: Path) -> bool:
    """Return True if the checkpoint was saved when the run ended early."""
    return _sort_key(checkpoint)[1:] == (True,)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, or the symbolic link in its place, if it belongs to the run."""
    if not is_own(checkpoint):
        return
    if not checkpoint.is_symlink():
        (checkpoint / MANIFEST).unlink(missing_ok=True)  # a partly deleted folder must not be read as a checkpoint
    remove_path(checkpoint)


def mark_in(base: Path) -> str:
    """Return the mark that a run writes into its checkpoints in `base`; empty if `base` is not a link.

    It is a digest of the run folder's path, so that a copy of the run deletes no checkpoint of the original.
    """
    if base.name != FOLDER or base.resolve().parent == base.parent.resolve():
        return ""
    return hashlib.sha256(os.fsencode(os.path.realpath(base.parent))).hexdigest()[:16]


def is_own(checkpoint: Path) -> bool:
    """Return True if a checkpoint belongs to the run in whose folder it is, so that the run may delete it."""
    mark = mark_in(checkpoint.parent)
    if not mark:  # not behind a link: nobody else writes there
        return True
    try:
        manifest = read_json(checkpoint / MANIFEST)
    except (OSError, ValueError, RL4LMsLikeError):
        return False
    return isinstance(manifest, dict) and manifest.get("run") == mark


def all_in(base: Path) -> list[Path]:
    """Return all checkpoints, oldest first, also those saved when the run ended early."""
    return sorted((path for path in base.glob("*") if _sort_key(path) and path.is_dir()), key=_sort_key)


def _with_state(base: Path) -> list[Path]:
    """Return all checkpoints that can be resumed, oldest first."""
    return [path for path in all_in(base) if (path / MANIFEST).is_file()]


def _sort_key(checkpoint: Path) -> tuple[int, bool] | tuple[()]:
    """Return the sort key of a checkpoint: its number, and True if the run ended early in the following iteration.

    It is empty for other folders and for those left by a killed process.
    """
    match = _NAME.fullmatch(checkpoint.name)
    if match is None or match["temporary"]:
        return ()
    return int(match["number"]), match["early"] is not None


def _is_temporary(path: Path) -> bool:
    """Return True for a temporary folder left by a killed process of this run."""
    match = _NAME.fullmatch(path.name)
    mark = mark_in(path.parent)
    return match is not None and bool(match["temporary"]) and (not mark or match["mark"] == mark)


def _remove_state(checkpoint: Path) -> None:
    """Delete the training state and keep the model. Targets of links are kept: they may belong to another user."""
    if checkpoint.is_symlink():
        return
    for name in (MANIFEST, STATE, TENSORS):  # the manifest first: without it, the others are not read
        (checkpoint / name).unlink(missing_ok=True)
    for path in checkpoint.glob(ALL_ROWS):
        path.unlink()


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a checkpoint that can be resumed") from None
    # A manifest may come from somewhere else: it must not make this process read files elsewhere.
    names = set(manifest["files"])
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in names):
        raise CheckpointError(f"{folder}: {MANIFEST} names files outside the checkpoint")

    version = manifest["format"]
    if version in OLDER_FORMATS:
        hint = "resume the run with that version, or start a new one from this model"
        raise CheckpointError(f"{folder}: written by {OLDER_FORMATS[version]}: {hint} (alg.policy.args.model_name)")
    if type(version) is not int or version != FORMAT or not {STATE, TENSORS} <= names:
        raise CheckpointError(f"{folder}: written in format {version!r}; this version reads format {FORMAT}")
    return manifest


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, one tensor after the other: also those that share memory, and split ones.

    Raises:
        OSError: it cannot be written.
    """
    from rl4lms_like.policies.sharding import whole
    from rl4lms_like.system.tensor_file import TensorFile

    with TensorFile(file, tensors, metadata) as writer:
        for name, tensor in tensors.items():
            writer.write(name, whole(tensor.detach()))


def _write_json(value: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def file_digest(file: Path) -> FileDigest:
    """Return the size and the SHA-256 of a file, as a manifest has them."""
    return {"bytes": file.stat().st_size, "sha256": _digest(file)}


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
