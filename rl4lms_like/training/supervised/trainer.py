"""Supervised or preference run: evaluate, train with transformers' Trainer, save, evaluate again.

    before         val, test      epoch 0
    training       val            at each evaluation of the Trainer, in addition to its loss; epochs can be fractions
    after          val, test      the saved model: the last one, or the best one with `load_best_model_at_end`

The Trainer receives the scores on `val` under their own keys, to select the best checkpoint and for early stopping.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from rl4lms_like.core.disk import saving
from rl4lms_like.core.errors import ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.core.interruption import Interruption
from rl4lms_like.core.out_of_memory import blame_memory_errors_on
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.loading import save_language_model
from rl4lms_like.policies.lora import has_lora
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.sink import Epoch
from rl4lms_like.training.config.cross_checks import SUPERVISED, unknown_metric
from rl4lms_like.training.doctor.alerts import report_alert
from rl4lms_like.training.evaluation import Evaluation, Responder, evaluate_on_samples
from rl4lms_like.training.resuming.checkpoints import INTERRUPTED, delete_interrupted, write_folder
from rl4lms_like.training.resuming.resume import log_resume_hint, save_interrupted
from rl4lms_like.training.resuming.states import frozen_digests
from rl4lms_like.training.supervised.assemble import SupervisedRun
from rl4lms_like.training.supervised.reference_trainer import HEAD, ReferenceTrainer, Reporter, ResumeState, trained
from rl4lms_like.training.supervised.training_arguments import PATH, make_training_arguments

logger = logging.getLogger(__name__)


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
        self.evaluated: dict[tuple[int, str], Evaluation | None] = {}
        self.interruption = Interruption(run.ranks)
        self.reporter = Reporter(self)
        self.frozen = frozen_digests(run.model, trained(run.model), run.samples)
        run.objective.prepare(tracker.run_path, run.examples)  # before a checkpoint's weights replace the initial ones
        self.trainer = self._make_trainer(None if resume_from is None else ResumeState(resume_from, self))

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
        if self.trainer.resume_state is None:
            with self.interruption.at_any_moment():
                self._check_best_metric(self.evaluate(("val", "test")))
        with self.interruption.finishing("this step"), blame_memory_errors_on("update"):
            self.trainer.train_or_resume()
        self.trainer.remove_older(has_ended=True)
        if self.schedule.save_model and self.run.ranks.is_main:
            folder = self.tracker.run_path / "model"
            with self.interruption.finishing("the model of this run"), saving(f"the model to {folder}"):
                write_folder(folder, self.save)
        if self._is_best_loaded():
            self.evaluated.pop((self.step, "val"), None)
        with self.interruption.at_any_moment():
            self.evaluate(("val", "test"))
        if self.run.ranks.is_main:
            delete_interrupted(self.tracker.checkpoint_base_path)

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self.trainer.state.global_step

    @property
    def epoch(self) -> Epoch:
        """Number of passes over the examples so far, rounded to four decimals."""
        passes = float(self.trainer.state.epoch or 0) if self.step else 0.0
        rounded = max(round(passes, 4), 0.0001) if passes else 0.0
        return int(rounded) if rounded.is_integer() else rounded

    def evaluate(self, splits: tuple[str, ...]) -> dict[str, Evaluation]:
        """Evaluate on the splits that have samples, at most once per optimizer step."""
        evaluations = {}
        for split in splits:
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples:
                continue
            if (self.step, split) not in self.evaluated:
                evaluation = self.evaluated[self.step, split] = self._evaluation(split, samples)
                self.tracker.log_metrics(self.epoch, split, evaluation.scores)
                if evaluation.predictions:  # none without a generator
                    self.tracker.log_predictions(self.epoch, split, evaluation.predictions)
                if split == "val":
                    self.report_alerts(split, evaluation.scores)
            if (found := self.evaluated[self.step, split]) is not None:  # None: evaluated before the run was resumed
                evaluations[split] = found
        return evaluations

    def _evaluation(self, split: str, samples: list[Sample]) -> Evaluation:
        """Generate texts and score them, without changing the random state that dropout uses in training."""
        seed, objective = self.run.config.seed, self.run.objective
        measured = objective.measure(self.run.examples[split].rows) if split in self.run.examples else {}
        if self.run.generator is None:
            return Evaluation(measured, [])
        responder = Responder(
            self.run.generator,
            self.run.tokenizer,
            batch_size=self.schedule.eval_batch_size,
            max_prompt_length=self.run.max_prompt_length,
            eos_token_ids=self.run.eos_token_ids,
            seed=seed,
            ranks=self.run.ranks,
        )
        post_processor = self.run.post_processor
        with seeded(derived_seed(seed, "metrics"), self.run.model.device):
            evaluation = evaluate_on_samples(
                responder, samples, self.run.metrics, split_name=split, post_processor=post_processor
            )
        return replace(evaluation, scores=measured | evaluation.scores)

    def report_alerts(self, split: str, numbers: Mapping[str, Any]) -> None:
        """Report new alerts of the objective, as the run doctor of RL runs does."""
        n_steps = self.trainer.state.max_steps
        for name, alert in self.run.objective.alerts(split, self.step, n_steps, numbers).items():
            report_alert(self.tracker, "step", self.step, name, alert)

    def save(self, folder: Path, *, is_checkpoint: bool = False) -> Path:
        """Save the language model and the tokenizer for `from_pretrained`.

        Args:
            folder: target folder.
            is_checkpoint: never merge adapters, so that the best ones can be loaded again.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        merge = self.run.config.alg.merge_on_save and not is_checkpoint
        with saving(f"the model to {folder}"):
            rates = self.run.dropout_rates
            save_language_model(self.run.model, folder, self.run.tokenizer, checkpoint_dropout=rates, merge=merge)
            if self.run.head and is_checkpoint and has_lora(self.run.model):
                save_file(self.head_weights(), folder / HEAD)
            return folder

    def head_weights(self) -> dict[str, Tensor]:
        """Return the weights of a reward model's output layer by name; they are not part of the adapters."""
        prefixes = tuple(f"{name}." for name in self.run.head)
        return {name: each for name, each in self.run.model.state_dict().items() if name.startswith(prefixes)}

    def may_stop(self) -> None:
        """Save a checkpoint and stop, if requested. Called between two steps.

        Raises:
            KeyboardInterrupt: a signal was received, by any process.
        """
        if not self.run.ranks.any(bool(self.interruption.requests)):
            return
        if self.schedule.save_model:
            self.reporter.flush()
            self.trainer.write_checkpoint(INTERRUPTED)
        raise KeyboardInterrupt

    def _rescue(self, error: BaseException) -> None:
        """Save the last logs and the model of a run that ends early. Failures do not hide the error that ended it."""
        try:
            self.reporter.flush()
        except (RL4LMsLikeError, OSError) as failure:
            logger.warning("the last values could not be logged: %s", failure)
        if self.interruption.requests > 1:
            self.tracker.log_info("stopped immediately: progress since the last checkpoint is lost")
        elif self.step and self.schedule.save_model and self.run.ranks.is_main:
            save_interrupted(self.tracker, self.save, self.step, "steps")
        log_resume_hint(self.tracker, error)

    def _make_trainer(self, resume_state: ResumeState | None) -> ReferenceTrainer:
        run = self.run
        callbacks: list[TrainerCallback] = [self.reporter]
        if run.config.alg.early_stopping_patience is not None:
            patience, threshold = run.config.alg.early_stopping_patience, run.config.alg.early_stopping_threshold
            callbacks.append(EarlyStoppingCallback(patience, threshold))
        folder, has_val = self.tracker.run_path / "checkpoints", bool(run.samples["val"])
        arguments = make_training_arguments(run.config, folder, has_val=has_val)
        try:
            trainer = ReferenceTrainer(
                self,
                resume_state,
                model=run.model,
                args=arguments,
                train_dataset=run.examples["train"].rows,
                eval_dataset=run.examples["val"].rows,
                data_collator=run.objective.collate,
                callbacks=callbacks,
            )
        except (ValueError, ImportError) as error:  # errors found only by the Trainer and its optimizers
            raise ConfigError([ConfigIssue(PATH, str(error))]) from error
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _check_best_metric(self, evaluations: dict[str, Evaluation]) -> None:
        """Check that the metric that selects the best checkpoint is computed."""
        wanted = self.trainer.args.metric_for_best_model
        if wanted is None:
            return
        known = ["loss", *evaluations["val"].scores]
        if wanted.removeprefix("eval_") not in known:
            raise ConfigError([unknown_metric(SUPERVISED, wanted, known)])

    def _is_best_loaded(self) -> bool:
        """Return True if the best model replaced that of the last step; log which one it is."""
        state = self.trainer.state
        if not self.trainer.args.load_best_model_at_end or state.best_model_checkpoint is None:
            return False
        best = f"{self.trainer.args.metric_for_best_model} {state.best_metric:.4g}"
        text = f"the best checkpoint is of step {state.best_global_step} ({best}); its model is the final model"
        self.tracker.log_info(text)
        return bool(state.best_global_step != state.global_step)
