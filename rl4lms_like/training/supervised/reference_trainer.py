"""Subclass of transformers' Trainer for supervised and preference runs, with our loss, evaluation and checkpoint files.

get_batch_samples ─ all micro-batches of an optimizer step ─> objective.begin_step
compute_loss ─ objective.loss: a sum over tokens or pairs / their number in the optimizer step, or in all of `val`

Trainer.evaluate ─ loss of `val` ─┬─ early stopping, best checkpoint
SupervisedTrainer.evaluate ───────┘  scores under `eval_<key>`
Trainer.log ─ Reporter ─> Tracker

Everything that changes during a run is saved without pickle, and restored at these events:

checkpoint-<step>/
    training_state.*     trained weights, optimizer, schedule, sums of the loss, random states
    trainer_state.json   the Trainer's own state: steps, best score so far, callbacks; without times

before the Trainer       weights, states of metrics
in the Trainer           optimizer, scheduler, scaler
on_train_begin           sums of the loss, best checkpoint, callbacks such as early stopping; the run's files are
                         truncated
first on_epoch_begin     random state at the start of the epoch, for the order of its examples
after skipped examples   random state of the checkpoint
"""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput

from rl4lms_like.core.component_state import load_state, state_of
from rl4lms_like.core.disk import saving
from rl4lms_like.core.errors import CheckpointError, ModelError
from rl4lms_like.core.out_of_memory import blame_memory_errors_on
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.lora import NAME, has_lora
from rl4lms_like.tracking.run_folder import to_json
from rl4lms_like.training.resuming import checkpoints, states
from rl4lms_like.training.resuming.checkpoints import STEP, TrainingState
from rl4lms_like.training.resuming.resume import remove_later
from rl4lms_like.training.supervised.objective import TrainingObjective
from rl4lms_like.training.supervised.training_arguments import PATH

if TYPE_CHECKING:
    from rl4lms_like.training.supervised.trainer import SupervisedTrainer

TRAINER_STATE = "trainer_state.json"
HEAD = "head.safetensors"
"""File in checkpoints of a reward model with adapters: the weights of its output layer."""
LOGGED = {
    "loss": "{}/loss",
    "eval_loss": "{}/val_loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "epoch": "{}/epoch",
}
"""Name of a value in the Trainer's logs -> metric key, with the name of the objective."""
STEP_RATE = "time/steps_per_s"
SHOWN_EVERY_S = 10.0
"""Seconds between steps that are shown on the console without being logged."""


class ReferenceTrainer(Trainer):
    """transformers' Trainer with the loss of an objective; its `owner` evaluates and saves.

    Raises:
        ValueError: the optimizer rejects its arguments.
        ImportError: the optimizer needs a package that is not installed.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, owner: SupervisedTrainer, resume_state: ResumeState | None, **arguments: Any) -> None:
        use_cache = getattr(owner.run.model.config, "use_cache", None)
        super().__init__(**arguments)
        owner.run.model.config.use_cache = use_cache  # the Trainer sets its own; it must not be saved with the model
        self.owner = owner
        self.objective: TrainingObjective = owner.run.objective
        self.ranks = owner.run.ranks
        self.resume_state = resume_state
        self.output_dir = Path(str(self.args.output_dir))
        self.save_total_limit = self.args.save_total_limit
        self.args.save_total_limit = None  # the Trainer would also delete files of others behind a link
        self.n_learned: Any = 0
        self.step_loss: Any = 0.0
        self.epoch_began = states.random_state()
        self.model_accepts_loss_kwargs = True  # the Trainer then passes `num_items_in_batch`
        self.create_optimizer()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        batches, n_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, self.objective.begin_step(batches, n_items)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.n_learned = self.n_learned + self.objective.n_tokens(inputs)
        loss = self._own_step(model, inputs, num_items_in_batch)
        self.step_loss = self.step_loss + loss  # each micro-batch is normalized by the step's items
        if self.accelerator.sync_gradients:  # of the last micro-batch of the optimizer step
            self.ranks.sum_gradients(model.parameters())
            self.objective.end_step()
        return loss

    def _own_step(self, model: Any, inputs: Any, n_items: Any) -> torch.Tensor:
        """Compute the gradient of this process's rows of a micro-batch; return the loss of all rows."""
        if self.ranks.size == 1:
            return super().training_step(model, inputs, n_items)
        own, loss = self.objective.own(inputs), torch.zeros((), device=self.args.device)
        # Dropout draws other numbers in each process, but the order of the examples is that of all of them.
        seed = derived_seed(self.args.seed, "rank", self.ranks.rank, int(self.n_learned))
        if self.objective.n_rows(own):
            with seeded(seed, self.args.device):
                loss = super().training_step(model, own, n_items)
        self.ranks.sum(loss)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a micro-batch; raise a `ModelError` if it is not finite during training."""
        is_training = model.training
        loss = self.objective.loss(model, inputs, num_items_in_batch)
        if is_training and not torch.isfinite(loss):
            text = f"the loss is {loss.item():g} in optimizer step {self.state.global_step + 1}, which is not taken"
            raise ModelError(f"{text}. Lower {PATH}.learning_rate, or check the data")
        return (loss, {}) if return_outputs else loss

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        metrics: dict[str, float] = {}
        if (n := len(dataloader.dataset)) and not self.objective.measures_loss:
            with seeded(0, self.args.device):  # the data loader must not advance the generator of dropout
                metrics[f"{metric_key_prefix}_loss"] = self._mean_loss(dataloader)
        scores = self.owner.evaluate(("val",))["val"].scores
        if self.objective.measures_loss:
            metrics[f"{metric_key_prefix}_loss"] = scores[f"{self.objective.name}/loss"]
        for key, score in scores.items():
            metrics[f"{metric_key_prefix}_{key}"] = self._comparable(score)
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=n)  # type: ignore[arg-type]

    @torch.no_grad()
    def _mean_loss(self, dataloader: Any) -> float:
        """Compute the mean loss over all learned tokens."""
        model, objective = self.owner.run.model.eval(), self.objective
        total, n = torch.zeros((), dtype=torch.float64), 0
        for inputs in dataloader:
            own = self._prepare_inputs(objective.own(inputs))
            with self.compute_loss_context_manager(), blame_memory_errors_on("evaluation"):
                total += float(self.compute_loss(model, own, num_items_in_batch=1)) if objective.n_rows(own) else 0.0
            n += int(objective.n_tokens(inputs))
        self.ranks.sum(total)
        return float(total) / max(n, 1)

    def _comparable(self, score: Any) -> float:
        """Return the score, or the worst value if it is not a number, so that NaN is never the best score."""
        if isinstance(score, (int, float)) and not math.isnan(score):
            return float(score)
        return -math.inf if self.args.greater_is_better else math.inf

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step, best_step = self.state.global_step, self.state.best_global_step
        best = self.output_dir / STEP.format(best_step)
        if best_step and (best_step == step or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        self.write_checkpoint(STEP)
        self.remove_older()

    def write_checkpoint(self, name: str) -> None:
        """Write a checkpoint of the model and, unless `save_only_model` is set, of the training state.

        `name` is the template of the folder's name.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        base, step = self.output_dir, self.state.global_step
        self.store_flos()

        def save(folder: Path) -> None:
            self.owner.save(folder, is_checkpoint=True)
            self._save_trainer_state(folder)

        def write() -> None:
            if self.args.save_only_model:
                checkpoints.write_folder(base / name.format(step), save)
                return
            state = self._training_state(before_step=name == checkpoints.INTERRUPTED)
            checkpoints.write_checkpoint(base, step, state, save, name=name)

        with saving(f"a checkpoint in {base}"):
            self.ranks.from_main(write)

    def _training_state(self, *, before_step: bool) -> TrainingState:
        """Capture the state of the run between two steps.

        With `before_step` the next step is about to begin. If it is the first of its epoch, the order of the examples
        is drawn already. The random state before that is captured, so that it can be drawn again.
        """
        owner, optimizer, scheduler = self.owner, self.optimizer, self.lr_scheduler
        assert optimizer is not None and scheduler is not None
        passes = float(self.state.epoch or 0)
        moments, scalars = states.optimizer_state(optimizer)
        began, began_numbers = self.epoch_began
        is_drawn = before_step and not math.fmod(passes, 1)
        generators, random_numbers = self.epoch_began if is_drawn else states.random_state()
        tensors = {f"model.{name}": tensor for name, tensor in trained(owner.run.model).items()}
        tensors |= moments | generators | {f"epoch_began.{name}": tensor for name, tensor in began.items()}
        tensors["loss"] = self._tr_loss
        scaler = self.accelerator.scaler
        numbers: dict[str, Any] = {
            "trainer": {
                "iteration": self.state.global_step,
                "passes": passes,
                "has_ended": self.control.should_training_stop,
                "best": self.state.best_model_checkpoint is not None,
                "n_learned": int(self.n_learned),
                "objective": self.objective.state_dict(),
                "evaluated": sorted(owner.evaluated),
                "loss": [self._total_loss_scalar, self._globalstep_last_logged],
            },
            "optimizer": scalars,
            "scheduler": scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "metrics": [state_of(metric) for metric in owner.run.metrics],
            "random": random_numbers,
            "epoch_began": began_numbers,
            "frozen": owner.frozen,
            "config": to_json(owner.tracker.run_config),
            "files": owner.tracker.file_sizes(),
        }
        return TrainingState(numbers, tensors)

    def _save_trainer_state(self, folder: Path) -> None:
        """Write the Trainer's own state, without times and paths."""
        state = copy.copy(self.state)
        state.best_model_checkpoint = None
        state.log_history = [
            {key: value for key, value in line.items() if not key.endswith(("_runtime", "_per_second"))}
            for line in state.log_history
        ]
        exported = [*self.callback_handler.callbacks, self.control]
        state.stateful_callbacks = {  # type: ignore[assignment]
            type(each).__name__: each.state() for each in exported if isinstance(each, ExportableState)
        }
        state.save_to_json(str(folder / TRAINER_STATE))

    def remove_older(self, *, has_ended: bool = False) -> None:
        """Remove the oldest checkpoints until `save_total_limit` are left; the best one is always kept.

        With a limit of one, also the newest is removed if training has ended and another one is the best.
        """
        if not self.ranks.is_main:
            return
        best, limit = self.state.best_model_checkpoint, self.save_total_limit
        spare = [] if best is None else [Path(best)]
        if limit:
            checkpoints.remove_older(self.output_dir, self.state.global_step, limit, spare)
        for path in checkpoints.checkpoints_in(self.output_dir) if has_ended and limit == 1 and spare else ():
            if path not in spare:
                checkpoints.remove(path)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def train_or_resume(self) -> None:
        """Train; resume from the checkpoint, if there is one."""
        if (found := self.resume_state) is None:
            self.train()
            return
        self.args.eval_on_start = False  # this was done when the run started
        steps = int(self.set_initial_training_values(self.args, self.get_train_dataloader())[-1])
        if found.step < steps and not found.stopped_early:
            self.train(resume_from_checkpoint=str(found.folder))
            return
        self.state = found.trainer_state
        self._restore_progress(found)
        self.owner.tracker.start(found.step, completed=found.step)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()

    def begin(self) -> None:
        """Restore what the Trainer resets when training begins."""
        if (found := self.resume_state) is None:
            return
        with states.restoring(found.folder):
            self._tr_loss.copy_(found.state.tensors["loss"])
            self._total_loss_scalar, self._globalstep_last_logged = found.state.numbers["trainer"]["loss"]
        self._restore_progress(found)

    def begin_epoch(self) -> None:
        """Restore the random state from which the order of the examples is drawn, and capture it."""
        if (found := self.resume_state) is not None and self.state.global_step == found.step:
            found.load_random("epoch_began" if found.is_within_epoch else "random")
        self.epoch_began = states.random_state()

    def _restore_progress(self, found: ResumeState) -> None:
        """Restore the best checkpoint, the callbacks and the number of learned tokens; truncate the run's files."""
        self.state.best_model_checkpoint = None if found.best is None else str(found.best)
        self.n_learned = found.n_learned
        self.objective.load_state_dict(found.objective)
        with states.restoring(found.folder):
            for callback in self.callback_handler.callbacks:
                saved = found.trainer_state.stateful_callbacks.get(type(callback).__name__)
                for name, value in (saved or {}).get("attributes", {}).items():
                    setattr(callback, name, value)
        self.owner.evaluated = dict.fromkeys(found.evaluated)
        tracker, where = self.owner.tracker, f"after step {found.step}"
        self.ranks.from_main(lambda: remove_later(tracker, found.folder, found.state, where))
        self.remove_older()

    # Methods of the Trainer that read pickles from a checkpoint.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if (found := self.resume_state) is None:
            return
        optimizer, scheduler, numbers = self.optimizer, self.lr_scheduler, found.state.numbers
        assert optimizer is not None and scheduler is not None
        with states.restoring(found.folder):
            states.load_optimizer(optimizer, numbers["optimizer"], found.state.part("optimizer."))
            scheduler.load_state_dict(numbers["scheduler"])
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(numbers["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.resume_state is not None:
            self.resume_state.load_random("random")

    def _read_nothing(self, *args: Any) -> None:
        """Do nothing: the weights are restored before the Trainer is created, the scaler with the optimizer."""

    _load_from_checkpoint = _load_scaler = _read_nothing  # type: ignore[assignment]

    def _load_best_model(self) -> None:
        model: Any = self.owner.run.model
        if not has_lora(model):
            super()._load_best_model()
            return
        import peft

        folder = Path(str(self.state.best_model_checkpoint))  # the Trainer supports only PEFT's own model class
        saved = load_file(folder / "adapter_model.safetensors")
        saved = {key.removeprefix("base_model.model."): value for key, value in saved.items()}
        if self.owner.run.head:
            model.load_state_dict(load_file(folder / HEAD), strict=False)
        result: Any = peft.set_peft_model_state_dict(model, saved, adapter_name=NAME)
        if result.unexpected_keys:
            raise ModelError(f"the adapters in {folder} do not match this model: {sorted(result.unexpected_keys)[:3]}")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise an error for missing weights, except for tied ones, which are saved under only one of their names."""
        weights = dict(self.owner.run.model.named_parameters(remove_duplicate=False))
        missing = set(load_result.missing_keys)
        loaded = {id(weight) for name, weight in weights.items() if name not in missing}
        strange = [name for name in sorted(missing) if id(weights.get(name)) not in loaded]
        strange += load_result.unexpected_keys
        if strange:
            folder = self.state.best_model_checkpoint
            raise ModelError(f"the best checkpoint, {folder}, does not match this model: {', '.join(strange[:3])}")


class Reporter(TrainerCallback):
    """Callback that forwards the Trainer's logs to the tracker of `owner`."""

    def __init__(self, owner: SupervisedTrainer) -> None:
        self.tracker = owner.tracker
        self.owner = owner
        self._began, self._seconds, self._n_steps = 0.0, 0.0, 0
        self._shown = -math.inf
        self._values: dict[str, Any] = {}
        name = owner.run.objective.name
        self._keys = {theirs: ours.format(name) for theirs, ours in LOGGED.items()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.trainer.begin()
        self.tracker.start(state.max_steps, completed=state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.trainer.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.may_stop()
        self._began = time.perf_counter()
        self.owner.trainer.step_loss = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self._seconds += now - self._began
        self._n_steps += 1
        values = None
        if now - self._shown >= SHOWN_EVERY_S:  # the first step, and steps long after the last log
            self._shown = now
            values = {self._keys["loss"]: float(self.owner.trainer.step_loss), STEP_RATE: self._n_steps / self._seconds}
        self.tracker.show_progress(state.global_step, values)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        self._values |= {ours: logs[theirs] for theirs, ours in self._keys.items() if theirs in logs}
        if "loss" in logs:
            averages = self.owner.run.objective.averages()
            self._values |= averages
            self.owner.report_alerts("train", averages)
        if "loss" not in logs or not control.should_evaluate:
            self.flush()

    def flush(self) -> None:
        """Log the values collected at this step. A loss is logged together with the evaluation that follows it."""
        values, self._values = self._values, {}
        if set(values) <= {self._keys["epoch"]}:
            return
        self._shown = time.perf_counter()
        values["time/iteration"] = self.owner.step
        if self._n_steps:
            values[STEP_RATE] = self._n_steps / self._seconds
            self._seconds, self._n_steps = 0.0, 0
        self.tracker.log_values(values, timesteps=int(self.owner.trainer.n_learned))


def trained(model: Any) -> dict[str, Tensor]:
    """Return name -> tensor for trained weights, each once, and for buffers that are saved."""
    saved = model.state_dict()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return weights | {name: buffer for name, buffer in model.named_buffers() if name in saved}


class ResumeState:
    """Checkpoint from which a run resumes. Weights and metrics are restored here, the rest by the Trainer.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another run.
    """

    def __init__(self, folder: Path, owner: SupervisedTrainer) -> None:
        self.folder, self.state = folder, checkpoints.read_checkpoint(folder)
        numbers = self.state.numbers
        with states.restoring(folder):
            self.trainer_state = TrainerState.load_from_json(str(folder / TRAINER_STATE))
            states.check_frozen(owner.frozen, numbers["frozen"])
            states.load_weights(trained(owner.run.model), self.state.part("model."))
            for metric, metric_state in zip(owner.run.metrics, numbers["metrics"], strict=True):
                load_state(metric, metric_state)
            done = numbers["trainer"]
            self.step = self.trainer_state.global_step
            self.stopped_early = done["has_ended"] and self.step < self.trainer_state.max_steps
            self.is_within_epoch = bool(math.fmod(done["passes"], 1))
            self.n_learned = int(done["n_learned"])
            self.objective: dict[str, Any] = done.get("objective", {})
            self.evaluated = [(int(step), str(split)) for step, split in done["evaluated"]]
            best = owner.tracker.checkpoint_base_path / STEP.format(self.trainer_state.best_global_step)
            self.best = best if done["best"] else None
            if self.best is not None and not self.best.is_dir():
                raise CheckpointError(f"the best checkpoint so far, {self.best}, is missing")

    def load_random(self, name: str) -> None:
        """Restore the random state of the checkpoint, `random`, or that of the start of its epoch, `epoch_began`."""
        prefix = "random." if name == "random" else f"{name}.random."
        with states.restoring(self.folder):
            states.load_random(self.state.numbers[name], self.state.part(prefix))
