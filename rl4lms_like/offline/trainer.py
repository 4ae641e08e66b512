"""Supervised or preference run: evaluate, train with transformers' Trainer, save, evaluate again.

    before         val, test      epoch 0
    training       val            at each evaluation of the Trainer, in addition to its loss; epochs can be fractions
    after          val, test      the saved model: the last one, or the best one with `load_best_model_at_end`

The Trainer receives the scores on `val` under their own keys, to select the best checkpoint and for early stopping.

    Trainer.log ─ Reporter ─> Tracker
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from rl4lms_like.callbacks.base import RunContext
from rl4lms_like.config.rules import SUPERVISED, unknown_metric
from rl4lms_like.core.processors import save_processor
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.offline.assemble_supervised import SupervisedRun, learns_response_of_dialogues
from rl4lms_like.offline.reference_trainer import ReferenceTrainer, ResumeState, trained
from rl4lms_like.offline.settable_arguments import PATH
from rl4lms_like.offline.training_arguments import make_training_arguments
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.loading import save_language_model
from rl4lms_like.policies.lora import has_lora
from rl4lms_like.policies.sharding import whole
from rl4lms_like.system.disk import saving
from rl4lms_like.system.errors import ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.system.interruption import Interruption
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.sink import Epoch
from rl4lms_like.training.alert import report_alert
from rl4lms_like.training.averages import SPLITS, average_of, save_average
from rl4lms_like.training.evaluation import Evaluation, Responder, evaluate_on_samples
from rl4lms_like.training.resuming.checkpoints import INTERRUPTED, delete_interrupted, write_folder
from rl4lms_like.training.resuming.resume import log_resume_hint, save_interrupted
from rl4lms_like.training.resuming.states import LEARNED_TURNS, frozen_digests
from rl4lms_like.training.saved_model import HEAD
from rl4lms_like.training.user_callbacks import user_callbacks

logger = logging.getLogger(__name__)

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


class SupervisedTrainer:
    """Trains a model on references or preferences and evaluates it.

    Args:
        run: result of `assemble_supervised` or `assemble_preferences`.
        tracker: destination of logs and files.
        resume_from: checkpoint of the same run to resume from.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to another run.
    """

    def __init__(self, run: SupervisedRun, tracker: Tracker, *, resume_from: Path | None = None) -> None:
        self.run = run
        self.tracker = tracker
        self.schedule = run.config.train_evaluation
        self.interruption = Interruption(run.ranks)
        context = RunContext(run.config, run.model, run.tokenizer, tracker.run_path, is_main=run.ranks.is_main)
        self.user_callbacks = user_callbacks(run.config, run.callbacks, context, run.ranks)
        self.average = average_of(self.schedule.average, run.model)  # begins with the initial weights
        self.reporter = Reporter(self)

        # Both before a checkpoint's weights replace the initial ones: the log-probs of a preference run's reference are
        # computed with these. The digests also before a metric may change the samples.
        self.frozen = frozen_digests(run.model, trained(run.model), run.samples)
        if learns_response_of_dialogues(run):
            self.frozen[LEARNED_TURNS] = "none"
        run.objective.prepare(tracker.run_path, run.examples)

        # The reference may be the model itself, of whose split weights some are then whole. An optimizer, or a restored
        # state, would belong to the whole weights instead of to this process's parts.
        run.objective.reshard()

        resume_state = None
        if resume_from is not None:
            resume_state = ResumeState(
                resume_from, run, tracker.checkpoint_base_path, self.frozen, self.user_callbacks, self.average
            )
        self.trainer = self._make_trainer(resume_state)

    def _make_trainer(self, resume_state: ResumeState | None) -> ReferenceTrainer:
        run = self.run
        folder = self.tracker.checkpoint_base_path
        n_examples = len(run.examples["train"].rows)
        arguments = make_training_arguments(run.config, folder, has_val=bool(run.samples["val"]), n_examples=n_examples)

        # The reporter is the last one: when training begins, it changes an argument that early stopping checks.
        callbacks: list[TrainerCallback] = [self.reporter]
        patience = run.config.alg.early_stopping_patience
        if patience is not None:
            callbacks.insert(0, EarlyStoppingCallback(patience, run.config.alg.early_stopping_threshold))

        try:
            trainer = ReferenceTrainer(
                run,
                self.tracker,
                evaluate_val=lambda: self.evaluate(("val",))["val"].scores,
                save_model_to=lambda path: self.save(path, is_checkpoint=True),
                frozen=self.frozen,
                user_callbacks=self.user_callbacks,
                average=self.average,
                resume_state=resume_state,
                model=run.model,
                args=arguments,
                train_dataset=run.examples["train"].rows,
                eval_dataset=run.examples["val"].rows,
                data_collator=run.objective.collate,
                callbacks=callbacks,
            )
        except (ValueError, ImportError) as error:  # errors found only by the Trainer and its optimizers
            raise ConfigError([ConfigIssue(PATH, str(error))]) from error

        # It would print each log as a dict; the tracker prints them.
        trainer.remove_callback(PrinterCallback)
        return trainer

    # --- the run ----------------------------------------------------------------------------------------------------

    def train_and_eval(self) -> None:
        """Train and evaluate. If the run ends early, save a checkpoint to resume from, or else the current model."""
        for split, examples in self.run.examples.items():
            for notice in examples.notices(split):
                self.tracker.log_info(notice)
        with self.interruption:
            try:
                self._train_and_eval()
            except BaseException as error:
                self._rescue(error)
                raise

    def _train_and_eval(self) -> None:
        # The untrained model. Its scores show before training whether the metric of the best checkpoint exists.
        if self.trainer.resume_state is None:
            with self.interruption.at_any_moment():
                self._check_best_metric(self.evaluate(("val", "test")))
            self.user_callbacks.check()

        with self.interruption.finishing("this step"), blame_memory_errors_on("update"):
            self.trainer.train_or_resume()
        self.trainer.remove_older(has_ended=True)

        # The model before the last evaluation: a metric that fails must not cost it.
        if self.schedule.save_model:
            with self.run.objective.led_by_main():
                if self.run.ranks.is_main:
                    self._save_final_model()
        self.user_callbacks.check()

        # The last step may have been evaluated on `val`, but with other weights than those of the best checkpoint.
        if self._is_best_loaded():
            self.trainer.evaluated.pop((self.step, "val"), None)
        with self.interruption.at_any_moment():
            self.evaluate(("val", "test"))
        self._evaluate_average()
        self.user_callbacks.check()
        if self.run.ranks.is_main:
            delete_interrupted(self.tracker.checkpoint_base_path)

    def _save_final_model(self) -> None:
        folder = self.tracker.run_path / "model"
        with self.interruption.finishing("the model of this run"), saving(f"the model to {folder}"):
            write_folder(folder, self.save)
        save_average(self.average, lambda folder: write_folder(folder, self.save), self.tracker, self.interruption)

    def _check_best_metric(self, evaluations: dict[str, Evaluation]) -> None:
        """Check that the metric that selects the best checkpoint is computed."""
        metric = self.trainer.args.metric_for_best_model
        if metric is None:
            return
        known = ["loss", *evaluations["val"].scores]
        # The Trainer accepts a metric with and without the prefix.
        if metric.removeprefix("eval_") not in known:
            raise ConfigError([unknown_metric(SUPERVISED, metric, known)])

    def _is_best_loaded(self) -> bool:
        """Return True if the best model replaced that of the last step; log which one it is."""
        state = self.trainer.state
        if not self.trainer.loads_best_model or state.best_model_checkpoint is None:
            return False
        best = f"{self.trainer.args.metric_for_best_model} {state.best_metric:.4g}"
        text = f"the best checkpoint is of step {state.best_global_step} ({best}); its model is the final model"
        self.tracker.log_info(text)
        return bool(state.best_global_step != state.global_step)

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self.trainer.state.global_step

    @property
    def epoch(self) -> Epoch:
        """Number of passes over the examples so far, rounded to four decimals."""
        passes = float(self.trainer.state.epoch or 0) if self.step else 0.0
        # Never 0 after the first step: epoch 0 in the files is the untrained model.
        rounded = max(round(passes, 4), 0.0001) if passes else 0.0
        return int(rounded) if rounded.is_integer() else rounded

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, splits: tuple[str, ...]) -> dict[str, Evaluation]:
        """Evaluate on the splits that have samples, at most once per optimizer step."""
        evaluations = {}
        evaluated = self.trainer.evaluated
        for split in splits:
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples:
                continue

            if (self.step, split) not in evaluated:
                evaluation = self._evaluate_split(split, samples)
                evaluated[self.step, split] = evaluation
                self.tracker.log_metrics(self.epoch, split, evaluation.scores)
                if evaluation.predictions:  # none without a generator
                    self.tracker.log_predictions(self.epoch, split, evaluation.predictions)
                if split == "val":
                    self.report_alerts(split, evaluation.scores)
                self.user_callbacks.on_evaluation_end(self.epoch, split, evaluation)

            # None: it was evaluated before the run was resumed, and the scores are in its files only.
            result = evaluated[self.step, split]
            if result is not None:
                evaluations[split] = result
        return evaluations

    def _evaluate_average(self) -> None:
        """Evaluate the averaged model on `val` and `test`, each once after the last step."""
        if self.average is None or not self.average.last:
            return
        for split, logged_split in SPLITS.items():
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples or (self.step, logged_split) in self.trainer.evaluated:
                continue
            with self.average.in_model(), self.interruption.at_any_moment():
                evaluation = self._evaluate_split(split, samples)
            self.trainer.evaluated[self.step, logged_split] = evaluation
            self.tracker.log_metrics(self.epoch, logged_split, evaluation.scores)
            if evaluation.predictions:
                self.tracker.log_predictions(self.epoch, logged_split, evaluation.predictions)

    def _evaluate_split(self, split: str, samples: list[Sample]) -> Evaluation:
        """Generate texts and score them, without changing the random state that dropout uses in training."""
        # What the objective itself measures: of `val`, and of `test` in a preference run.
        measured: dict[str, float] = {}
        if split in self.run.examples:
            measured = self.run.objective.measure(self.run.examples[split].rows)
        if self.run.generator is None:
            return Evaluation(measured, [])

        seed = self.run.config.seed
        responder = Responder(
            self.run.generator,
            self.run.tokenizer,
            batch_size=self.schedule.eval_batch_size,
            max_prompt_length=self.run.max_prompt_length,
            eos_token_ids=self.run.eos_token_ids,
            dialogue=None,
            seed=seed,
            ranks=self.run.ranks,
        )
        # A metric may draw from the global generators, too, for instance when it creates a model.
        with self.run.objective.gathered(), seeded(derived_seed(seed, "metrics"), self.run.model.device):
            evaluation = evaluate_on_samples(
                responder,
                samples,
                self.run.metrics,
                split_name=split,
                post_processor=self.run.post_processor,
            )
        return replace(evaluation, scores=measured | evaluation.scores)

    def report_alerts(self, split: str, numbers: Mapping[str, Any]) -> None:
        """Report new alerts of the objective, as the run doctor of RL runs does."""
        n_steps = self.trainer.state.max_steps
        for name, alert in self.run.objective.alerts(split, self.step, n_steps, numbers).items():
            report_alert(self.tracker, "step", self.step, name, alert)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, *, is_checkpoint: bool = False) -> Path:
        """Save the language model and its tokenizer or processor, for `from_pretrained`.

        Args:
            folder: target folder.
            is_checkpoint: never merge adapters, so that the best ones can be loaded again.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        run = self.run
        with saving(f"the model to {folder}"):
            save_language_model(
                run.model,
                folder,
                run.tokenizer,
                checkpoint_dropout=run.dropout_rates,
                merge=run.config.alg.merge_on_save and not is_checkpoint,
                eos_token_ids=run.eos_token_ids,
            )
            if run.pictures is not None:
                save_processor(run.pictures.processor, folder, run.tokenizer)

            # A final model with merged adapters has its head in the model's files.
            if run.head and is_checkpoint and has_lora(run.model):
                save_file(self._head_weights(), folder / HEAD)
        self.user_callbacks.on_save(folder)
        return folder

    def _head_weights(self) -> dict[str, Tensor]:
        """Return the weights of a reward model's output layer by name; they are not part of the adapters."""
        prefixes = tuple(f"{name}." for name in self.run.head)
        head = {}
        for name, weight in self.run.model.state_dict().items():
            if name.startswith(prefixes):
                head[name] = whole(weight)
        return head

    def may_stop(self) -> None:
        """Save a checkpoint and stop, if requested or if a callback has failed. Called before each step.

        Raises:
            KeyboardInterrupt: a signal was received, by any process.
            ComponentError: a callback has failed.
        """
        # All processes must stop at the same step, since each waits for the gradients of the others.
        if self.run.ranks.any(bool(self.interruption.requests) or self.user_callbacks.failure is not None):
            self._save_interrupted(before_step=True)
            self.user_callbacks.check()
            raise KeyboardInterrupt

    def stop_if_failed(self) -> None:
        """Save a checkpoint and stop, if a callback has failed. Called after the last step.

        Raises:
            ComponentError: a callback has failed.
        """
        if self.run.ranks.any(self.user_callbacks.failure is not None):
            self._save_interrupted(before_step=False)
            self.user_callbacks.check()

    def _save_interrupted(self, *, before_step: bool) -> None:
        if self.schedule.save_model:
            # Before the checkpoint, which records how long the run's files are.
            self.reporter.flush()
            self.trainer.write_checkpoint(INTERRUPTED, before_step=before_step)

    def _rescue(self, error: BaseException) -> None:
        """Save the last logs and the model of a run that ends early. Failures do not hide the error that ended it."""
        try:
            self.reporter.flush()
        except (RL4LMsLikeError, OSError) as failure:
            logger.warning("the last values could not be logged: %s", failure)

        # Only the model, not the state to resume from: within a step, this is none that a run could continue from.
        if self.interruption.requests > 1:
            self.tracker.log_info("stopped immediately: progress since the last checkpoint is lost")
        elif self.run.objective.network is not None and not isinstance(error, KeyboardInterrupt):
            text = "the current model is not saved: its weights are split, and other processes may have ended elsewhere"
            self.tracker.log_info(text)
        elif self.step and self.schedule.save_model:
            with self.run.objective.led_by_main():
                if self.run.ranks.is_main:
                    save_interrupted(self.tracker, self.save, self.step, "steps")
        self.user_callbacks.warn()
        log_resume_hint(self.tracker, error)


class Reporter(TrainerCallback):
    """Callback that forwards the Trainer's logs to the tracker of `owner`, and its events to the `ReferenceTrainer`."""

    def __init__(self, owner: SupervisedTrainer) -> None:
        self.owner = owner
        self.tracker = owner.tracker
        objective_name = owner.run.objective.name
        self._keys = {theirs: ours.format(objective_name) for theirs, ours in LOGGED.items()}

        # Since the last log: values to be logged, number and duration of the steps.
        self._values: dict[str, Any] = {}
        self._n_steps = 0
        self._seconds = 0.0
        self._step_began = 0.0
        self._saves_at_epoch_end = False
        self._shown_at = -math.inf  # the first step is shown

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.trainer.begin()
        self.tracker.start(state.max_steps, completed=state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.trainer.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.may_stop()
        self._step_began = time.perf_counter()
        self.owner.trainer.step_loss = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self._seconds += now - self._step_began
        self._n_steps += 1

        # With evaluations or logs at the end of an epoch, the checkpoint of its last step comes after them: a run that
        # resumes from it begins with the next epoch, and would omit them. The end of training also ends an epoch.
        is_last_of_epoch = control.should_training_stop or float(state.epoch).is_integer()
        if is_last_of_epoch and IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy):
            self._saves_at_epoch_end = control.should_save
            control.should_save = False

        # The loss is read from the device, which waits for it: not in every step.
        values = None
        if now - self._shown_at >= SHOWN_EVERY_S:
            self._shown_at = now
            values = {self._keys["loss"]: float(self.owner.trainer.step_loss), STEP_RATE: self._n_steps / self._seconds}
        self.tracker.show_progress(state.global_step, values)
        self.owner.run.objective.on_step_end(state.global_step)
        if self.owner.average is not None:
            self.owner.average.update(state.global_step)
        self.owner.user_callbacks.on_iteration_end(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.owner.stop_if_failed()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or self._saves_at_epoch_end
        self._saves_at_epoch_end = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        self._values |= {ours: logs[theirs] for theirs, ours in self._keys.items() if theirs in logs}
        if "loss" in logs:
            averages = self.owner.run.objective.averages()
            self._values |= averages
            self._values |= self.owner.user_callbacks.pop_numbers()
            self.owner.report_alerts("train", averages)

        # A loss is logged together with the evaluation that follows it at the same step.
        if "loss" not in logs or not control.should_evaluate:
            self.flush()

    def flush(self) -> None:
        """Log the values collected at this step."""
        values = self._values
        self._values = {}
        # The Trainer's last log has no value of ours but the epoch.
        if set(values) <= {self._keys["epoch"]}:
            return

        self._shown_at = time.perf_counter()
        values["time/iteration"] = self.owner.step
        if self._n_steps:
            values[STEP_RATE] = self._n_steps / self._seconds
            self._seconds = 0.0
            self._n_steps = 0
        self.tracker.log_values(values, timesteps=int(self.owner.trainer.n_learned))
