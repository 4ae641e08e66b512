"""The supervised run: evaluate, learn the references with transformers' Trainer, save, evaluate again.

    before         val, test      epoch 0
    training       val            at each evaluation of the Trainer, beside its loss; a fraction of an epoch counts
    after          val, test      the model that is saved: the last one, or the best one with `load_best_model_at_end`

The Trainer sees the scores of `val` under their own keys, so that they can choose the best checkpoint and stop early.
"""

from __future__ import annotations

import difflib
import logging
from pathlib import Path

from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from rl4lms_like.core.errors import ConfigError, Mistake, RL4LMsLikeError
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.saving import save_language_model
from rl4lms_like.policies.teacher_forcing import decoder_start_token_id
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.sink import Epoch
from rl4lms_like.training.assemble_supervised import SupervisedRun
from rl4lms_like.training.evaluation import Evaluation, evaluate_on_samples
from rl4lms_like.training.examples import ExampleCollator
from rl4lms_like.training.interrupted import save_interrupted
from rl4lms_like.training.reference_trainer import ReferenceTrainer, Reporter
from rl4lms_like.training.training_arguments import PATH

logger = logging.getLogger(__name__)


class SupervisedTrainer:
    """Trains a model on references, and evaluates it.

    Args:
        run: what `assemble_supervised` built.
        tracker: where numbers and files go.
    """

    def __init__(self, run: SupervisedRun, tracker: Tracker) -> None:
        self.run = run
        self.tracker = tracker
        self.schedule = run.config.train_evaluation
        self._own_use_cache = getattr(run.model.config, "use_cache", None)
        self._evaluated: dict[tuple[int, str], Evaluation] = {}
        self.reporter = Reporter(self)
        self.trainer = self._make_trainer()

    def train_and_eval(self) -> None:
        """The whole run; if it ends early, it saves the model as it stands."""
        for split, examples in self.run.examples.items():
            for notice in examples.notices(split):
                self.tracker.log_info(notice)
        self._check_best_metric(self.evaluate(("val", "test")))
        try:
            self.trainer.train()
        except BaseException:
            self._rescue()
            raise
        if self.schedule.save_model:
            self.save(self.tracker.run_path / "model")
        if self._is_best_loaded():
            self._evaluated.pop((self.step, "val"), None)
        self.evaluate(("val", "test"))

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self.trainer.state.global_step

    @property
    def epoch(self) -> Epoch:
        """Passes over the examples so far, in four decimals."""
        passes = float(self.trainer.state.epoch or 0) if self.step else 0.0
        rounded = max(round(passes, 4), 0.0001) if passes else 0.0
        return int(rounded) if rounded.is_integer() else rounded

    def evaluate(self, splits: tuple[str, ...]) -> dict[str, Evaluation]:
        """Evaluates on splits that have samples, once for each number of steps."""
        evaluations = {}
        for split in splits:
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples:
                continue
            if (self.step, split) not in self._evaluated:
                evaluation = self._evaluated[self.step, split] = self._evaluation(split, samples)
                self.tracker.log_metrics(self.epoch, split, evaluation.scores)
                self.tracker.log_predictions(self.epoch, split, evaluation.predictions)
            evaluations[split] = self._evaluated[self.step, split]
        return evaluations

    def _evaluation(self, split: str, samples: list[Sample]) -> Evaluation:
        """Texts and their scores; what a metric draws does not reach the dropout of the training."""
        seed = self.run.config.seed
        with seeded(derived_seed(seed, "metrics"), self.run.model.device):
            return evaluate_on_samples(
                self.run.writer,
                self.run.tokenizer,
                samples,
                self.run.metrics,
                split_name=split,
                batch_size=self.schedule.eval_batch_size,
                max_prompt_length=self.run.max_prompt_length,
                eos_token_ids=self.run.eos_token_ids,
                post_processor=self.run.post_processor,
                seed=seed,
            )

    def save(self, folder: Path) -> Path:
        """Writes the language model and the tokenizer, ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        return self._save(folder, merge=self.run.config.alg.merge_on_save)

    def save_checkpoint(self, folder: Path) -> Path:
        """As `save`, but adapters always alone, so that the best ones can be taken up again."""
        return self._save(folder, merge=False)

    def _save(self, folder: Path, *, merge: bool) -> Path:
        model = self.run.model
        in_training = getattr(model.config, "use_cache", None)
        model.config.use_cache = self._own_use_cache  # the Trainer switches it off
        try:
            return save_language_model(model, folder, self.run.tokenizer, checkpoint_dropout={}, merge=merge)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot save the model to {folder}: {error}") from error
        finally:
            model.config.use_cache = in_training

    def _rescue(self) -> None:
        """Saves the model of a run that ends early, and what it last logged; what fails does not hide why it ended."""
        try:
            self.reporter.flush()
        except (RL4LMsLikeError, OSError) as error:
            logger.warning("the last numbers are lost: %s", error)
        if self.step and self.schedule.save_model:
            save_interrupted(self.tracker, self.save, self.step, "steps")

    def _make_trainer(self) -> ReferenceTrainer:
        run = self.run
        start = decoder_start_token_id(run.model) if run.writer.is_encoder_decoder else None
        callbacks: list[TrainerCallback] = [self.reporter]
        if run.config.alg.early_stopping_patience is not None:
            patience, threshold = run.config.alg.early_stopping_patience, run.config.alg.early_stopping_threshold
            callbacks.append(EarlyStoppingCallback(patience, threshold))
        arguments = run.training_arguments(self.tracker.run_path / "checkpoints")
        try:
            trainer = ReferenceTrainer(
                self,
                model=run.model,
                args=arguments,
                train_dataset=run.examples["train"].rows,
                eval_dataset=run.examples["val"].rows,
                data_collator=ExampleCollator(TextLayout(run.tokenizer, 1, 1).pad_token_id, start),
                callbacks=callbacks,
            )
        except (ValueError, ImportError) as error:  # what only the Trainer and its optimizers know to be wrong
            raise ConfigError([Mistake(PATH, str(error))]) from error
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _check_best_metric(self, evaluations: dict[str, Evaluation]) -> None:
        """The metric that chooses the best checkpoint is among those that are computed."""
        wanted = self.trainer.args.metric_for_best_model
        if wanted is None:
            return
        known = ["loss", *evaluations["val"].scores]
        name = wanted.removeprefix("eval_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError([Mistake(f"{PATH}.metric_for_best_model", f"no metric gives {wanted!r}; {hint}")])

    def _is_best_loaded(self) -> bool:
        """Whether the model is not that of the last step any more; says which one it is."""
        state = self.trainer.state
        if not self.trainer.args.load_best_model_at_end or state.best_model_checkpoint is None:
            return False
        self.tracker.log_info(
            f"the best checkpoint is that of step {state.best_global_step} "
            f"({self.trainer.args.metric_for_best_model} {state.best_metric:.4g}): it is the model of this run"
        )
        return bool(state.best_global_step != state.global_step)
