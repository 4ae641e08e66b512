"""Saving of runs that end early, for whatever reason, and log messages on how to resume them.

checkpoints/interrupted_00003      3 iterations are completed; the run resumes within the fourth
                                   without a training state, it holds only the current model
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from pathlib import Path

from rl4lms_like.core.errors import CheckpointError, OutOfMemoryError, RL4LMsLikeError
from rl4lms_like.core.import_paths import code_options
from rl4lms_like.core.schema import at
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.config.remote_code import trust_option
from rl4lms_like.training.resuming.checkpoints import (
    INTERRUPTED,
    MANIFEST,
    ended_early,
    newest_checkpoint,
    write_folder,
)
from rl4lms_like.training.resuming.resume import MEMORY

logger = logging.getLogger(__name__)


def save_interrupted(tracker: Tracker, save: Callable[[Path], Path], n_done: int, unit: str) -> None:
    """Save the model to `checkpoints/interrupted_<n_done>`, unless that folder holds a checkpoint to resume from.

    A failure is logged and not raised, so that it does not hide the error that ended the run.

    Args:
        tracker: tracker of the run.
        save: writes the model to a folder.
        n_done: number of completed iterations or steps.
        unit: unit of `n_done`, "iterations" or "steps".
    """
    try:
        folder = tracker.checkpoint_base_path / INTERRUPTED.format(n_done)
        if (folder / MANIFEST).is_file():  # the run resumed from it and ended again before a newer state was saved
            return
        write_folder(folder, save)
    except (RL4LMsLikeError, OSError) as error:
        logger.warning("interrupted after %d %s; the model could not be saved: %s", n_done, unit, error)
    else:
        tracker.log_info(f"interrupted after {n_done} {unit}; current model: {folder}")


def tell_the_way_on(tracker: Tracker, error: BaseException | None = None) -> None:
    """Log the command that resumes a run, if there is one. After running out of memory, add options that need less."""
    try:
        checkpoint = newest_checkpoint(tracker.run_path)
    except CheckpointError:
        return
    where = "where it was interrupted" if ended_early(checkpoint) else f"after {checkpoint.name}"
    tracker.log_info(
        f"to resume {where}: rl4lms-like train --resume {shlex.quote(str(tracker.run_path))}{code_options()}"
        f"{trust_option(tracker.run_config)}"
    )
    if isinstance(error, OutOfMemoryError):
        free = [f"--set {key}=..." for key in MEMORY if at(tracker.run_config, key.rpartition(".")[0]) is not None]
        tracker.log_info(f"to use less memory: add {' or '.join(free)}; other keys that save memory need a new run")
