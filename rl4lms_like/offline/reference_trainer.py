"""Subclass of transformers' Trainer for supervised and preference runs, with our loss, evaluation and checkpoint files.

get_batch_samples ─ all micro-batches of an optimizer step ─> objective.begin_step
compute_loss ─ objective.loss: a sum over tokens or pairs / their number in the optimizer step, or in all of `val`

Trainer.evaluate ─ loss of `val` ─┬─ early stopping, best checkpoint
SupervisedTrainer.evaluate ───────┘  scores under `eval_<key>`

Everything that changes during a run is saved without pickle, and restored at these events:

checkpoint-<step>/
    training_state.*     trained weights, optimizer, schedule, sums of the loss, random states
    trainer_state.json   the Trainer's own state: steps, best score so far, callbacks; without times

before the Trainer       weights, states of metrics and of users' callbacks
on_train_begin           optimizer, scheduler, scaler, sums of the loss, best checkpoint, callbacks such as early
                         stopping; the run's files are truncated
first on_epoch_begin     random state at the start of the epoch, for the order of its examples
after skipped examples   random state of the checkpoint (get_batch_samples)

Two private methods of the Trainer are overridden, `_save_checkpoint` and `_load_from_checkpoint`; the comments above
them say why no public method or callback is enough.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, load_sharded_checkpoint
from transformers.training_args import OptimizerNames
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.offline.assemble_supervised import SupervisedRun, load_head
from rl4lms_like.offline.objective import TrainingObjective
from rl4lms_like.offline.settable_arguments import PATH
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.lora import has_lora, load_adapters
from rl4lms_like.policies.offloaded_activations import saved_in_main_memory
from rl4lms_like.policies.sharding import with_all
from rl4lms_like.system.component_state import load_state, state_of
from rl4lms_like.system.disk import saving
from rl4lms_like.system.errors import CheckpointError, ModelError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.schema import at
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.run_folder import to_json
from rl4lms_like.training.averages import WeightAverage
from rl4lms_like.training.resuming import checkpoints, states
from rl4lms_like.training.resuming.checkpoints import STEP, TrainingState
from rl4lms_like.training.resuming.resume import remove_later
from rl4lms_like.training.saved_model import HEAD
from rl4lms_like.training.user_callbacks import UserCallbacks

TRAINER_STATE = "trainer_state.json"
_ROWS = "rows"
"""Name of the other processes' part of writing a checkpoint."""
PICKLES = ("optimizer*", "scheduler.pt", "scaler.pt", "rng_state*")
"""Files that transformers' Trainer reads from a checkpoint after the weights, each a pickle."""


class ReferenceTrainer(Trainer):
    """transformers' Trainer with the loss of an objective, and with evaluations and files of this library.

    Args:
        run: returned by `assemble_supervised` or `assemble_preferences`.
        tracker: has the run's folder, whose files are truncated if the run is resumed.
        evaluate_val: evaluates on `val`; returns the scores by key.
        save_model_to: writes the model of a checkpoint to a folder.
        frozen: digests of what training does not change.
        user_callbacks: their states are part of checkpoints.
        average: of the trained weights, is part of checkpoints, too.
        resume_state: state to resume from; None for a new run.
        arguments: of transformers' Trainer.

    Attributes:
        evaluated: (optimizer steps, split) of each evaluation so far; the result, or None if it was made before the run
            was resumed.
        n_learned: number of tokens learned so far.
        step_loss: loss of the current optimizer step so far.
        pass_counts: False in a pass that this process makes only for the others; see `TrainingObjective.own_passes`.

    Raises:
        ValueError: the optimizer rejects its arguments.
        ImportError: the optimizer needs a package that is not installed.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        run: SupervisedRun,
        tracker: Tracker,
        *,
        evaluate_val: Callable[[], Mapping[str, Any]],
        save_model_to: Callable[[Path], Any],
        frozen: Mapping[str, str],
        user_callbacks: UserCallbacks,
        average: WeightAverage | None,
        resume_state: ResumeState | None,
        **arguments: Any,
    ) -> None:
        # The Trainer sets its own `use_cache`; it must not be saved with the model.
        use_cache = getattr(run.model.config, "use_cache", None)
        super().__init__(**arguments)
        run.model.config.use_cache = use_cache

        self.run = run
        self.tracker = tracker
        self.evaluate_val = evaluate_val
        self.save_model_to = save_model_to
        self.frozen = frozen
        self.user_callbacks = user_callbacks
        self.average = average
        self.resume_state = resume_state
        self.objective: TrainingObjective = run.objective
        self.ranks = run.ranks
        self.evaluated: dict[tuple[int, str], Any] = {}
        self.n_learned: Any = 0
        self.step_loss: Any = 0.0
        self.pass_counts = True
        self.epoch_began = states.random_state()

        # The Trainer would delete checkpoints of other runs, too, where several share a folder behind a link.
        self.output_dir = Path(str(self.args.output_dir))
        self.save_total_limit = self.args.save_total_limit
        self.args.save_total_limit = None
        self.loads_best_model = bool(self.args.load_best_model_at_end)

        # Batches stay in main memory: the objective plans its passes there, and moves what it needs (`to_device`).
        self.accelerator.device_placement = False

        # The Trainer counts the items of a step only for models whose forward accepts the number; here, the objective
        # divides by it.
        self.model_accepts_loss_kwargs = True
        # An optimizer with wrong arguments fails here, before training begins.
        self.create_optimizer()

    # --- the loss ---------------------------------------------------------------------------------------------------

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """Return the class of the optimizer and its arguments."""
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if args.optim == OptimizerNames.ADAMW_TORCH_8BIT:
            from rl4lms_like.policies.adamw_8bit import AdamW8bit

            optimizer_class = AdamW8bit
        return optimizer_class, kwargs

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        batches, n_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        n_items = self.objective.begin_step(batches, n_items)
        self.objective.begin_balancing(self.model, batches)

        # Before its first step, a run that resumes within an epoch has drawn the order of the examples again, which
        # advanced the generators. From here on, they are those of the checkpoint.
        resumed = self.resume_state
        if resumed is not None and resumed.is_within_epoch and self.state.global_step == resumed.step:
            resumed.load_random("random")
        return batches, n_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        # The Trainer would move them to the device here.
        return inputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.n_learned = self.n_learned + self.objective.n_tokens(inputs)
        if self.ranks.size == 1:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            loss = self._step_on_rows_of_this_process(model, inputs, num_items_in_batch)

        # A sum, not a mean: the loss of each micro-batch is divided by the items of the whole step.
        self.step_loss = self.step_loss + loss

        # True for the last micro-batch of the optimizer step. The processes share gradients once per step; those of
        # split weights are summed by the backward pass.
        if self.accelerator.sync_gradients:
            if self.objective.network is None:
                self.ranks.sum_gradients(model.parameters())
            self.objective.reshard()
            self.objective.end_step()
            self._require_finite_loss()
        return loss

    def _require_finite_loss(self) -> None:
        """Raise a `ModelError` if the loss of the optimizer step is not finite, before the step is taken."""
        # The optimizer would write NaN to every weight. The weights are still those after the last finite loss. Once
        # per optimizer step: in each micro-batch, the process would wait for the device.
        loss = float(self.step_loss)
        if not math.isfinite(loss):
            text = f"the loss is {loss:g} in optimizer step {self.state.global_step + 1}, which is not taken"
            raise ModelError(f"{text}. Lower {PATH}.learning_rate, or check the data")

    def _step_on_rows_of_this_process(self, model: Any, inputs: Any, n_items: Any) -> torch.Tensor:
        """Compute the gradient of this process's rows of a micro-batch; return the loss of all rows."""
        loss = torch.zeros((), device=self.args.device)

        # Dropout draws other numbers in each process. The global generators must stay equal in all of them, since the
        # order of the examples is drawn from these.
        seed = derived_seed(self.args.seed, "rank", self.ranks.rank, int(self.n_learned))
        for own_inputs, counts in self.objective.own_passes([inputs]):
            self.pass_counts = counts
            with seeded(seed, self.args.device):
                loss = super().training_step(model, own_inputs, n_items)
        self.pass_counts = True
        self.ranks.sum(loss)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a micro-batch."""
        # Not of evaluations, which save nothing.
        offloading: AbstractContextManager[None] = nullcontext()
        if self.run.config.alg.activation_offload and torch.is_grad_enabled():
            offloading = saved_in_main_memory(chain(model.parameters(), model.buffers()))
        with offloading:
            if self.pass_counts:
                loss = self.objective.loss(model, inputs, num_items_in_batch)
            else:
                loss = self.objective.loss_without_weight(model, inputs)
        return (loss, {}) if return_outputs else loss

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        metrics: dict[str, float] = {}
        loss_key = f"{metric_key_prefix}_loss"
        n_examples = len(dataloader.dataset)

        # The data loader draws a number, which must not advance the generator of dropout.
        if n_examples and not self.objective.measures_loss:
            with seeded(0, self.args.device):
                metrics[loss_key] = self._mean_loss(dataloader)
        scores = self.evaluate_val()
        if self.objective.measures_loss:
            metrics[loss_key] = scores[f"{self.objective.name}/loss"]

        for key, score in scores.items():
            metrics[f"{metric_key_prefix}_{key}"] = self._comparable(score)
        return EvalLoopOutput(
            predictions=None,  # type: ignore[arg-type]
            label_ids=None,
            metrics=metrics,
            num_samples=n_examples,
        )

    @torch.no_grad()
    def _mean_loss(self, dataloader: Any) -> float:
        """Compute the mean loss over all learned tokens."""
        model = self.run.model.eval()
        objective = self.objective
        total = torch.zeros((), dtype=torch.float64)
        n_tokens = 0

        for inputs in dataloader:
            # Each process computes its rows, but counts the tokens of all rows, which every process has.
            for own_inputs, counts in objective.own_passes([inputs]):
                with self.compute_loss_context_manager(), blame_memory_errors_on("evaluation"):
                    # Divided by 1 item, it is a sum, so that a batch counts with the number of its tokens.
                    loss = float(self.compute_loss(model, own_inputs, num_items_in_batch=1))
                total += loss if counts else 0.0
            n_tokens += int(objective.n_tokens(inputs))
        self.ranks.sum(total)
        return float(total) / max(n_tokens, 1)

    def _comparable(self, score: Any) -> float:
        """Return the score, or the worst value if it is not a number, so that NaN is never the best score."""
        if isinstance(score, (int, float)) and not math.isnan(score):
            return float(score)
        return -math.inf if self.args.greater_is_better else math.inf

    # --- checkpoints ------------------------------------------------------------------------------------------------

    # A private method of the Trainer. `on_save` of a callback comes only after the Trainer's own checkpoint, whose
    # optimizer and random states are pickles, and whose files are written one by one into the final folder. All earlier
    # callbacks come before the comparison with the best score so far, which the checkpoint must record.
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        best_step = self.state.best_global_step

        # The best checkpoint is this one, or an earlier one that was written: an evaluation without a checkpoint may
        # have the best score as well.
        best = self.output_dir / STEP.format(best_step)
        if best_step and (best_step == step or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        self.write_checkpoint(STEP)
        self.remove_older()

    def write_checkpoint(self, name: str, *, before_step: bool = False) -> None:
        """Write a checkpoint of the model and, unless `save_only_model` is set, of the training state.

        Args:
            name: template of the folder's name.
            before_step: the next step is about to begin; see `_training_state`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        base = self.output_dir
        step = self.state.global_step
        self.store_flos()

        def save(folder: Path) -> None:
            self.save_model_to(folder)
            self._save_trainer_state(folder)

        def write() -> None:
            if self.args.save_only_model:
                checkpoints.write_folder(base / name.format(step), save)
                return
            state = self._training_state(before_step=before_step)
            in_parts = self.objective.network is not None and self.run.config.distributed.checkpoint == "split"
            write_rows = self._write_rows if in_parts else None
            checkpoints.write_checkpoint(base, step, state, save, name=name, write_rows=write_rows)

        with saving(f"a checkpoint in {base}"):
            if self.objective.network is None:
                self.ranks.from_main(write)
                return
            works = {_ROWS: lambda: checkpoints.write_rows_of_processes(self._weights(), self.ranks)}
            with self.objective.led_by_main(self.optimizer, works):
                if self.ranks.is_main:
                    write()

    def _weights(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that may be split: weights, and moments of the optimizer."""
        assert self.optimizer is not None
        tensors = {f"model.{name}": tensor for name, tensor in trained(self.run.model).items()}
        tensors |= {f"objective.{name}": tensor for name, tensor in self.objective.tensors().items()}
        moments, _ = states.optimizer_state(self.optimizer)
        return tensors | moments

    def _write_rows(self, folder: Path) -> dict[str, checkpoints.FileDigest]:
        """Let all processes write their rows of the weights and moments."""
        with_all(_ROWS)
        return checkpoints.write_rows_of_processes(self._weights(), self.ranks, folder)

    def _training_state(self, *, before_step: bool) -> TrainingState:
        """Capture the state of the run between two steps.

        With `before_step` the next step is about to begin. If it is the first of its epoch, the order of the examples
        is drawn already. The random state before that is captured, so that it can be drawn again.
        """
        assert self.optimizer is not None and self.lr_scheduler is not None
        passes = float(self.state.epoch or 0)
        _, optimizer_numbers = states.optimizer_state(self.optimizer)

        # `passes` is a whole number after the last step of an epoch, and before the first one of the next.
        epoch_generators, epoch_numbers = self.epoch_began
        is_order_drawn = before_step and not math.fmod(passes, 1)
        generators, random_numbers = self.epoch_began if is_order_drawn else states.random_state()

        tensors = self._weights() | generators
        tensors |= {f"epoch_began.{name}": tensor for name, tensor in epoch_generators.items()}
        # Private values of the Trainer, which sets them to 0 when training begins and has no public name for them:
        # the loss since the last log, the loss before it, and the step of that log.
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
                "evaluated": sorted(self.evaluated),
                "loss": [self._total_loss_scalar, self._globalstep_last_logged],
            },
            "optimizer": optimizer_numbers,
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "metrics": [state_of(metric) for metric in self.run.metrics],
            "random": random_numbers,
            "epoch_began": epoch_numbers,
            "frozen": self.frozen,
            "config": to_json(self.tracker.run_config),
            "files": self.tracker.file_sizes(),
        }
        if self.user_callbacks.callbacks:
            numbers["callbacks"] = self.user_callbacks.state_dict()
        if self.average is not None:
            numbers["average"] = self.average.state_dict()
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.tensors().items()}
        return TrainingState(numbers, tensors)

    def _save_trainer_state(self, folder: Path) -> None:
        """Write the Trainer's own state, without times and paths."""
        # A resumed run must write the same bytes, also in another folder.
        state = copy.copy(self.state)
        state.best_model_checkpoint = None
        state.log_history = []
        for line in self.state.log_history:
            without_times = {key: value for key, value in line.items() if not key.endswith(("_runtime", "_per_second"))}
            state.log_history.append(without_times)

        callback_states: dict[str, Any] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                callback_states[type(callback).__name__] = callback.state()
        state.stateful_callbacks = callback_states  # type: ignore[assignment]
        state.save_to_json(str(folder / TRAINER_STATE))

    def remove_older(self, *, has_ended: bool = False) -> None:
        """Remove the oldest checkpoints until `save_total_limit` are left; the best one is always kept.

        With a limit of one, also the newest is removed if training has ended and another one is the best.
        """
        if not self.ranks.is_main:
            return
        best = self.state.best_model_checkpoint
        spare = [] if best is None else [Path(best)]
        limit = self.save_total_limit
        if limit:
            checkpoints.remove_older(self.output_dir, self.state.global_step, limit, spare)

        # Until training ends, the newest one is kept besides the best, to resume from.
        if has_ended and limit == 1 and spare:
            for path in checkpoints.checkpoints_in(self.output_dir):
                if path not in spare:
                    checkpoints.remove(path)

    # --- training, from the start or from a checkpoint --------------------------------------------------------------

    def train_or_resume(self) -> None:
        """Train; resume from the checkpoint, if there is one. Load the best model at the end, if configured."""
        resumed = self.resume_state
        if resumed is None:
            self.train()
        else:
            self.args.eval_on_start = False  # this was done when the run started
            n_steps = int(self.set_initial_training_values(self.args, self.get_train_dataloader())[-1])
            if resumed.step < n_steps and not resumed.stopped_early:
                self.train(resume_from_checkpoint=str(resumed.folder))
            else:
                # Nothing is left to train: it was interrupted after its last step, or after it had stopped early.
                self.state = resumed.trainer_state
                self._restore_progress(resumed)
                self.tracker.start(resumed.step, completed=resumed.step)

        if self.loads_best_model and self.state.best_model_checkpoint is not None:
            self._load_best(Path(self.state.best_model_checkpoint))

    def begin(self) -> None:
        """Restore what the Trainer resets when training begins; called from `on_train_begin`."""
        # `train_or_resume` loads the best model instead: the Trainer supports adapters only in PEFT's own model class.
        # Not before training begins, when EarlyStoppingCallback warns if the argument is false.
        self.args.load_best_model_at_end = False

        resumed = self.resume_state
        if resumed is None:
            return
        numbers = resumed.state.numbers
        assert self.optimizer is not None and self.lr_scheduler is not None
        with states.restoring(resumed.folder):
            states.load_optimizer(self.optimizer, numbers["optimizer"], resumed.state.part("optimizer."))
            self.lr_scheduler.load_state_dict(numbers["scheduler"])
            self._use_changed_rate(numbers["config"])
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(numbers["scaler"])
            # Copied, because the Trainer accepts only a tensor on the device of the losses.
            self._tr_loss.copy_(resumed.state.tensors["loss"])
            self._total_loss_scalar, self._globalstep_last_logged = numbers["trainer"]["loss"]
        self._restore_progress(resumed)

    def _use_changed_rate(self, config_before: Mapping[str, Any]) -> None:
        """Use the config's learning rate if it differs from that of the checkpoint, which the states have restored."""
        rate = self.args.learning_rate
        before = at(config_before, f"{PATH}.learning_rate")
        before = TrainingArguments.learning_rate if before is None else before
        if before == rate:
            return

        # A schedule is a factor of the rate that it began with, and so is the rate of the next step.
        assert self.optimizer is not None and self.lr_scheduler is not None
        self.lr_scheduler.base_lrs = [rate for _ in self.lr_scheduler.base_lrs]
        for group in self.optimizer.param_groups:
            group["lr"] *= rate / before
            group["initial_lr"] = rate
        self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]  # which is logged

    def begin_epoch(self) -> None:
        """Restore the random state from which the order of the examples is drawn, and capture it."""
        resumed = self.resume_state
        if resumed is not None and self.state.global_step == resumed.step:
            resumed.load_random("epoch_began" if resumed.is_within_epoch else "random")
        self.epoch_began = states.random_state()

    def _restore_progress(self, resumed: ResumeState) -> None:
        """Restore the best checkpoint, the callbacks and the number of learned tokens; truncate the run's files."""
        self.state.best_model_checkpoint = None if resumed.best is None else str(resumed.best)
        self.n_learned = resumed.n_learned
        self.objective.load_state_dict(resumed.objective)
        self.evaluated = dict.fromkeys(resumed.evaluated)

        # Callbacks with a state, such as the patience of early stopping, by the names of their classes.
        with states.restoring(resumed.folder):
            for callback in self.callback_handler.callbacks:
                saved = resumed.trainer_state.stateful_callbacks.get(type(callback).__name__)
                for name, value in (saved or {}).get("attributes", {}).items():
                    setattr(callback, name, value)

        # Lines and checkpoints after the checkpoint's step are those of the part that is repeated.
        where = f"after step {resumed.step}"
        self.ranks.from_main(lambda: remove_later(self.tracker, resumed.folder, resumed.state, where))
        self.remove_older()

    # A private method of the Trainer, which `train(resume_from_checkpoint=...)` calls before any callback. It would
    # load the model's files over the weights that `ResumeState` has restored, and raise an error if these are adapters
    # outside of PEFT's own model class. No public argument omits only this.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load no weights, since they are restored before the Trainer is created; refuse files of other programs.

        Raises:
            CheckpointError: the checkpoint has files that this library does not write and the Trainer would unpickle.
        """
        folder = Path(resume_from_checkpoint)
        pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
        if pickles:
            raise CheckpointError(f"{folder} has pickles, which are not read: remove {', '.join(pickles)}")

    def _load_best(self, folder: Path) -> None:
        """Load the weights of the best checkpoint.

        Raises:
            ModelError: they do not match the model.
        """
        model: Any = self.run.model
        self.objective.reshard()
        with self.objective.loading():
            if has_lora(model):
                if self.run.head:
                    load_head(model, folder / HEAD)
                load_adapters(model, folder / "adapter_model.safetensors")
                return
            if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
                result = load_sharded_checkpoint(model, str(folder), strict=False)
            else:
                result = model.load_state_dict(load_file(folder / SAFE_WEIGHTS_NAME), strict=False)

        # Tied weights are saved under only one of their names: a missing one that is the same object is loaded.
        weights = dict(model.named_parameters(remove_duplicate=False))
        missing = set(result.missing_keys)
        loaded_ids = {id(weight) for name, weight in weights.items() if name not in missing}
        wrong = [name for name in sorted(missing) if id(weights.get(name)) not in loaded_ids]
        wrong += result.unexpected_keys
        if wrong:
            raise ModelError(f"the best checkpoint, {folder}, does not match this model: {', '.join(wrong[:3])}")


def trained(model: Any) -> dict[str, Tensor]:
    """Return name -> tensor for trained weights, each once, and for buffers that are saved."""
    saved = model.state_dict()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return weights | {name: buffer for name, buffer in model.named_buffers() if name in saved}


class ResumeState:
    """Checkpoint from which a run resumes. Weights, metrics and callbacks are restored here, the rest by the Trainer.

    Args:
        folder: the checkpoint.
        run: gets its weights and the states of its metrics.
        best_folder: has the run's checkpoints, one of which may be the best so far.
        frozen: digests of what training does not change; they must be those of the checkpoint.
        user_callbacks: get their states.
        average: gets its state, too.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another run.
    """

    def __init__(
        self,
        folder: Path,
        run: SupervisedRun,
        best_folder: Path,
        frozen: Mapping[str, str],
        user_callbacks: UserCallbacks,
        average: WeightAverage | None,
    ) -> None:
        self.folder = folder
        self.state = checkpoints.read_checkpoint(folder)
        numbers = self.state.numbers

        with states.restoring(folder):
            self.trainer_state = TrainerState.load_from_json(str(folder / TRAINER_STATE))
            states.check_frozen(frozen, numbers["frozen"], run.config.tokenizer)
            states.load_weights(trained(run.model), self.state.part("model."))
            for metric, metric_state in zip(run.metrics, numbers["metrics"], strict=True):
                load_state(metric, metric_state)
            states.load_weights(run.objective.tensors(), self.state.part("objective."))
            if "callbacks" in numbers:
                user_callbacks.load_state_dict(numbers["callbacks"])
            if average is not None:
                average.restore(numbers.get("average"), self.state.part("average."))

            progress = numbers["trainer"]
            self.step = self.trainer_state.global_step
            self.stopped_early = progress["has_ended"] and self.step < self.trainer_state.max_steps
            self.is_within_epoch = bool(math.fmod(progress["passes"], 1))
            self.n_learned = int(progress["n_learned"])
            self.objective: dict[str, Any] = progress.get("objective", {})
            self.evaluated = [(int(step), str(split)) for step, split in progress["evaluated"]]

            # Without it, the end of the run would silently have another model.
            best = best_folder / STEP.format(self.trainer_state.best_global_step)
            self.best = best if progress["best"] else None
            if self.best is not None and not self.best.is_dir():
                raise CheckpointError(f"the best checkpoint so far, {self.best}, is missing")

    def load_random(self, name: str) -> None:
        """Restore the random state of the checkpoint, `random`, or that of the start of its epoch, `epoch_began`."""
        prefix = "random." if name == "random" else f"{name}.random."
        with states.restoring(self.folder):
            states.load_random(self.state.numbers[name], self.state.part(prefix))
