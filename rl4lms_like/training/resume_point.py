"""State from which a run can be resumed, updated by the trainer and written on schedule or when the run is interrupted.

completed iterations ─ mark ─┐
steps of an update ─ mark_in_update ─┴─ the run ends ─ rescue ─> checkpoints/interrupted_00003
                                        save_every ── write ──> checkpoints/iteration_00003
"""

from __future__ import annotations

import copy
import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rl4lms_like.core.disk import naming, reason
from rl4lms_like.core.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.tracking.run_folder import check_sizes, to_json
from rl4lms_like.training.resuming import snapshot
from rl4lms_like.training.resuming.checkpoints import (
    INTERRUPTED,
    ITERATION,
    MANIFEST,
    TrainingState,
    ended_early,
    forget_later,
    read_checkpoint,
    skipped,
    write_checkpoint,
)
from rl4lms_like.training.resuming.interrupted import save_interrupted, tell_the_way_on
from rl4lms_like.training.resuming.resume import rounding_notices

if TYPE_CHECKING:
    from rl4lms_like.training.trainer import OnPolicyTrainer

logger = logging.getLogger(__name__)


class ResumePoint:
    """State that a run resumes from, after a whole number of iterations or of steps of an update.

    Args:
        trainer: of the run.

    Attributes:
        is_saved: whether a checkpoint of this state exists.
    """

    def __init__(self, trainer: OnPolicyTrainer) -> None:
        self.trainer, self.run, self.tracker = trainer, trainer.run, trainer.tracker
        self.is_saved = False
        self._state: TrainingState | None = None
        snapshot.remembered(self.run)  # reports unsavable state now, not at the first checkpoint
        if trainer.schedule.save_model:
            _ = self._frozen  # computed before a reward or a metric may change the samples

    def clear(self) -> None:
        """Discard the state: the run cannot be resumed in the middle of what follows."""
        self._state = None

    def mark(self, *, is_saved: bool = False) -> None:
        """Capture the state of the run; if the run ends before the next mark, it resumes from here."""
        trainer, state = self.trainer, snapshot.light(self.run)
        state.numbers["trainer"] = {"iteration": trainer.current_iter, "evaluated": sorted(trainer.evaluated)}
        watchers = {name: watcher.state_dict() for name, watcher in trainer.watchers.items()}
        state.numbers["watchers"] = copy.deepcopy(watchers)
        state.numbers["files"] = self.tracker.file_sizes(on_disk=False)
        self._state, self.is_saved = state, is_saved

    def mark_in_update(self) -> None:
        """Capture the state between two steps of an update; stop the run here if an interruption was requested."""
        if self._state is None or "update" not in self._state.numbers:
            self.mark()
        assert self._state is not None
        self._state, self.is_saved = snapshot.in_update(self.run, self._state), False
        self._state.numbers["trainer"] |= {"seconds": self.trainer.seconds}
        self.trainer.interruption.check()

    def write(self) -> Path:
        """Write the checkpoint of a completed iteration.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        self.mark()
        assert self._state is not None
        folder = self._write(self._state, ITERATION)
        self.is_saved = True
        return folder

    def _write(self, light: TrainingState, name: str) -> Path:
        state, iteration = snapshot.take(self.run, light, self._frozen), self.trainer.current_iter
        try:
            self.tracker.file_sizes()  # flushes the files to disk
            state.numbers["config"] = to_json(self.tracker.run_config)
            base, keep = self.tracker.checkpoint_base_path, self.trainer.schedule.keep_last
            with naming(base / name.format(iteration)):
                return write_checkpoint(base, iteration, state, self.trainer.save, name=name, keep=keep)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot write the checkpoint of iteration {iteration}: {reason(error)}") from error

    # --- a run that ends early --------------------------------------------------------------------------------------

    def rescue(self, error: BaseException) -> None:
        """Save the state to resume from when a run ends early, unless nothing would be lost."""
        trainer, update, state = self.trainer, self.run.algorithm.update, self._state
        is_fresh = trainer.current_iter == 0 and update is None and isinstance(error, Exception)
        try:
            if trainer.interruption.requests > 1:
                return
            if not trainer.schedule.save_model:
                self.tracker.log_info("this run saves nothing: train_evaluation.save_model is false")
            elif state is None or (update is not None and not ("update" in state.numbers and update.can_go_on)):
                save_interrupted(self.tracker, trainer.save, trainer.current_iter, "iterations")
            elif not self.is_saved and not is_fresh:
                self._write_interrupted(state)
        finally:
            if trainer.interruption.requests > 1:
                self.tracker.log_info("stopped immediately: progress since the last checkpoint is lost")
            tell_the_way_on(self.tracker, error)

    def _write_interrupted(self, state: TrainingState) -> None:
        """Write the checkpoint of an interrupted run; a failure is only logged, to not hide why the run ended."""
        try:
            folder = self._write(state, INTERRUPTED)
        except Exception as error:
            logger.warning("the state to resume from could not be saved: %s: %s", type(error).__name__, error)
        else:
            done = self.trainer.current_iter
            self.tracker.log_info(f"interrupted after {done} iterations; state saved to {folder}")

    # --- a run that resumes -----------------------------------------------------------------------------------------

    def resume(self, checkpoint: Path) -> None:
        """Restore the state of a checkpoint, and remove what was written to the run's folder after it.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another run.
        """
        trainer, state = self.trainer, read_checkpoint(checkpoint)
        snapshot.put_back(self.run, state, self._frozen)
        try:
            numbers = state.numbers["trainer"]
            trainer.current_iter, trainer.seconds_before = numbers["iteration"], numbers.get("seconds", 0.0)
            trainer.evaluated = {(epoch, split) for epoch, split in numbers["evaluated"]}
            if not all(type(epoch) is int and split in self.run.samples for epoch, split in trainer.evaluated):
                raise ValueError("trainer.evaluated is not a list of epochs and splits")
            if state.numbers["watchers"].keys() != trainer.watchers.keys():
                raise ValueError("watchers differ from those of the run")
            for name, watcher in trainer.watchers.items():
                watcher.load_state_dict(state.numbers["watchers"][name])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: cannot be read: {type(error).__name__}: {error}") from error
        base, done, files = self.tracker.checkpoint_base_path, trainer.current_iter, state.numbers.get("files", {})
        check_sizes(self.tracker.run_path, files)
        others = skipped(base, done)
        forget_later(base, done, trainer.schedule.keep_last, interrupted=ended_early(checkpoint))
        self.tracker.cut_files(files)  # last, because the later checkpoints removed above refer to the lines
        self.is_saved = (base / ITERATION.format(done) / MANIFEST).is_file()
        where = f"in iteration {done + 1}" if "update" in state.numbers else f"after {done}"
        self.tracker.log_info(f"resuming {where}, from {checkpoint}{others}")
        for notice in rounding_notices(state.numbers["config"], self.tracker.run_config):
            self.tracker.log_info(notice)

    @cached_property
    def _frozen(self) -> dict[str, str]:
        return snapshot.digests(self.run)
