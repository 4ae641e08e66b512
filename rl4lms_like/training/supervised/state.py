"""Capture and restore everything that changes during a supervised run of transformers' Trainer, without pickle.

checkpoint-<step>/
    training_state.*     trained weights, optimizer, schedule, sums of the loss, random states
    trainer_state.json   the Trainer's own state: steps, best score so far, callbacks; without times

event in the Trainer                     what is restored
(before the Trainer)                     weights, states of metrics
its state is read                        best checkpoint, callbacks such as early stopping
optimizer, scheduler, scaler exist       their states
on_train_begin                           sums of the loss; the run's files are truncated
on_epoch_begin                           random state at the start of the epoch, for the order of its examples
first step                               random state of the checkpoint
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from rl4lms_like.core.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.core.remembering import load_state, state_of
from rl4lms_like.core.wording import shown
from rl4lms_like.training.resuming.checkpoints import STEP, TrainingState, read_checkpoint
from rl4lms_like.training.resuming.states import (
    frozen_digests,
    load_optimizer,
    load_random,
    optimizer_state,
    random_state,
)
from rl4lms_like.training.supervised.assemble import SupervisedRun

if TYPE_CHECKING:
    from rl4lms_like.training.supervised.reference_trainer import ReferenceTrainer

TRAINER_STATE = "trainer_state.json"


def take(trainer: ReferenceTrainer, *, before_step: bool = False) -> TrainingState:
    """Capture the state of a run between two steps.

    Args:
        trainer: trainer of the run.
        before_step: whether the next step is about to begin. If it is the first of its epoch, the order of the examples
            is drawn already. The random state before that is captured, so that it can be drawn again.
    """
    optimizer: Any = trainer.optimizer
    moments, scalars = optimizer_state(optimizer)
    began, began_numbers = trainer.epoch_began
    is_drawn = before_step and not math.fmod(float(trainer.state.epoch or 0), 1)
    generators, random_numbers = trainer.epoch_began if is_drawn else random_state()
    tensors = {f"model.{name}": tensor for name, tensor in trained(trainer.owner.run).items()}
    tensors |= moments | generators | {f"epoch_began.{name}": tensor for name, tensor in began.items()}
    tensors["loss"] = trainer._tr_loss
    scaler = trainer.accelerator.scaler
    numbers: dict[str, Any] = {
        "trainer": {
            "iteration": trainer.state.global_step,
            "passes": float(trainer.state.epoch or 0),
            "has_ended": trainer.control.should_training_stop,
            "best": trainer.state.best_model_checkpoint is not None,
            "n_learned": int(trainer.n_learned),
            "loss": [trainer._total_loss_scalar, trainer._globalstep_last_logged],
        },
        "optimizer": scalars,
        "scheduler": trainer.lr_scheduler.state_dict(),  # type: ignore[union-attr]
        "scaler": None if scaler is None else scaler.state_dict(),
        "metrics": [state_of(metric) for metric in trainer.owner.run.metrics],
        "random": random_numbers,
        "epoch_began": began_numbers,
    }
    return TrainingState(numbers, tensors)


def save_trainer_state(trainer: ReferenceTrainer, folder: Path) -> None:
    """Write the Trainer's own state, without times and paths."""
    state = copy.copy(trainer.state)
    state.best_model_checkpoint = None
    state.log_history = [
        {key: value for key, value in line.items() if not key.endswith(("_runtime", "_per_second"))}
        for line in state.log_history
    ]
    exported = [*trainer.callback_handler.callbacks, trainer.control]
    state.stateful_callbacks = {  # type: ignore[assignment]
        type(each).__name__: each.state() for each in exported if isinstance(each, ExportableState)
    }
    state.save_to_json(str(folder / TRAINER_STATE))


def trained(run: SupervisedRun) -> dict[str, Tensor]:
    """Return name -> tensor for trained weights, each once, and for buffers that are saved."""
    model: Any = run.model
    saved = model.state_dict()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return weights | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def digests(run: SupervisedRun) -> dict[str, str]:
    """Return SHA-256 digests of the weights and samples that do not change during the run."""
    return frozen_digests(run.model, {tensor.data_ptr() for tensor in trained(run).values()}, run.samples)


class GoingOn:
    """Checkpoint from which a Trainer resumes. Its parts are restored at the corresponding events of the Trainer.

    Args:
        folder: folder of the checkpoint.
        run: run that was just assembled from the same config.
        checkpoints: folder of the run's checkpoints.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another run.
    """

    def __init__(self, folder: Path, run: SupervisedRun, checkpoints: Path) -> None:
        self.folder = folder
        self.state = read_checkpoint(folder)
        self.is_first_epoch = True
        try:
            self.trainer_state = TrainerState.load_from_json(str(folder / TRAINER_STATE))
            self._put_back(run)
            done = self.state.numbers["trainer"]
            self.step = self.trainer_state.global_step
            self.stopped_early = done["has_ended"] and self.step < self.trainer_state.max_steps
            if self.step != done["iteration"]:
                raise ValueError(f"{TRAINER_STATE} belongs to step {shown(self.step)}")
            self.n_learned = int(done["n_learned"])
            self.evaluated = [(int(step), str(split)) for step, split in done["evaluated"]]
            self.best = checkpoints / STEP.format(self.trainer_state.best_global_step) if done["best"] else None
        except RL4LMsLikeError as error:
            raise CheckpointError(f"{folder}: {error}") from error
        except Exception as error:  # loading the state of another model can raise any exception
            raise CheckpointError(f"{folder}: does not match this run: {type(error).__name__}: {error}") from error
        if self.best is not None and not self.best.is_dir():
            raise CheckpointError(f"{folder}: the best checkpoint so far, {self.best}, is missing")

    @torch.no_grad()
    def _put_back(self, run: SupervisedRun) -> None:
        for what, digest in digests(run).items():
            if self.state.numbers["frozen"][what] != digest:
                raise CheckpointError(f"the {what} are not those of the run")
        own, saved = trained(run), self._part("model.")
        if own.keys() != saved.keys():
            raise CheckpointError(f"its model has other weights: {', '.join(sorted(own.keys() ^ saved.keys())[:3])}")
        for name, tensor in own.items():
            if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
                raise CheckpointError(f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint")
            tensor.copy_(saved[name])
        for metric, remembered in zip(run.metrics, self.state.numbers["metrics"], strict=True):
            load_state(metric, remembered)

    def to_callbacks(self, trainer: ReferenceTrainer) -> None:
        """Restore the best checkpoint and the callbacks, after the Trainer has read its state."""
        trainer.state.best_model_checkpoint = None if self.best is None else str(self.best)
        for callback in trainer.callback_handler.callbacks:
            saved = self.trainer_state.stateful_callbacks.get(type(callback).__name__)
            for name, value in (saved or {}).get("attributes", {}).items():
                setattr(callback, name, value)

    def to_optimizer(self, trainer: ReferenceTrainer) -> None:
        """Restore optimizer, scheduler and scaler, after the Trainer has created them."""
        optimizer: Any = trainer.optimizer
        numbers = self.state.numbers
        try:
            load_optimizer(optimizer, numbers["optimizer"], self._part("optimizer."), factored=True)
            trainer.lr_scheduler.load_state_dict(numbers["scheduler"])  # type: ignore[union-attr]
            if trainer.accelerator.scaler is not None:
                trainer.accelerator.scaler.load_state_dict(numbers["scaler"])
        except Exception as error:
            raise CheckpointError(f"{self.folder}: does not match this run: {type(error).__name__}: {error}") from error

    def to_sums(self, trainer: ReferenceTrainer) -> None:
        """Restore the sums of the loss and the number of learned tokens, when training begins."""
        trainer.n_learned = self.n_learned
        trainer._tr_loss.copy_(self.state.tensors["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = self.state.numbers["trainer"]["loss"]

    def to_epoch(self) -> None:
        """Restore the random state when the first epoch begins, so that its examples have the same order as before."""
        if not self.is_first_epoch:
            return
        self.is_first_epoch = False
        if math.fmod(self.state.numbers["trainer"]["passes"], 1):
            load_random(self.state.numbers["epoch_began"], self._part("epoch_began.random."))
        else:
            self.to_random()

    def to_random(self) -> None:
        """Restore the random state before the first step."""
        load_random(self.state.numbers["random"], self._part("random."))

    def _part(self, prefix: str) -> dict[str, Tensor]:
        tensors = self.state.tensors
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
