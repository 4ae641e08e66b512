"""What is saved of a run that ends early, whatever ended it, and how its reader learns of it.

checkpoints/interrupted_00003      3 iterations are completed; the run goes on within the fourth
                                   or, without a training state, the model as it stood
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
    """Saves the model to `checkpoints/interrupted_<n_done>`, unless what the run goes on from is there.

    A failure to do so does not hide why the run ended.

    Args:
        tracker: of the run.
        save: writes the model to a folder.
        n_done: iterations or steps that are completed.
        unit: what `n_done` counts.
    """
    try:
        folder = tracker.checkpoint_base_path / INTERRUPTED.format(n_done)
        if (folder / MANIFEST).is_file():  # it went on from there, and ended before there was more to go on from
            return
        write_folder(folder, save)
    except (RL4LMsLikeError, OSError) as error:
        logger.warning("interrupted after %d %s, and the model is lost: %s", n_done, unit, error)
    else:
        tracker.log_info(f"interrupted after {n_done} {unit}; the model so far: {folder}")


def tell_the_way_on(tracker: Tracker, error: BaseException | None = None) -> None:
    """Says how a run that ended early goes on, if it can; where the memory ran out, what it may change on the way."""
    try:
        checkpoint = newest_checkpoint(tracker.run_path)
    except CheckpointError:
        return
    where = "where it was interrupted" if ended_early(checkpoint) else f"after {checkpoint.name}"
    tracker.log_info(
        f"it goes on {where}: rl4lms-like train --resume {shlex.quote(str(tracker.run_path))}{code_options()}"
        f"{trust_option(tracker.run_config)}"
    )
    if isinstance(error, OutOfMemoryError):
        free = [f"--set {key}=..." for key in MEMORY if at(tracker.run_config, key.rpartition(".")[0]) is not None]
        tracker.log_info(f"in less memory: add {' or '.join(free)}; the other keys that need less make another run")
