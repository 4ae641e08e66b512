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

from rl4lms_like.core.disk import reason
from rl4lms_like.core.errors import ConfigError, Mistake, RL4LMsLikeError
from rl4lms_like.core.interruption import Interruption
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.out_of_memory import in_part
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.saving import save_language_model
from rl4lms_like.policies.teacher_forcing import decoder_start_token_id
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.run_folder import check_sizes, to_json
from rl4lms_like.tracking.sink import Epoch
from rl4lms_like.training.evaluation import Evaluation, evaluate_on_samples
from rl4lms_like.training.resuming.checkpoints import (
    INTERRUPTED,
    ended_early,
    forget_interrupted,
    forget_later,
    skipped,
    write_checkpoint,
    write_folder,
)
from rl4lms_like.training.resuming.interrupted import save_interrupted, tell_the_way_on
from rl4lms_like.training.resuming.resume import rounding_notices
from rl4lms_like.training.supervised.assemble import SupervisedRun
from rl4lms_like.training.supervised.examples import ExampleCollator
from rl4lms_like.training.supervised.reference_trainer import ReferenceTrainer, Reporter
from rl4lms_like.training.supervised.state import GoingOn, digests, save_trainer_state, take
from rl4lms_like.training.supervised.training_arguments import PATH

logger = logging.getLogger(__name__)


class SupervisedTrainer:
    """Trains a model on references, and evaluates it.

    Args:
        run: what `assemble_supervised` built.
        tracker: where numbers and files go.
        resume_from: a checkpoint of the same run, to go on from.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another run.
    """

    def __init__(self, run: SupervisedRun, tracker: Tracker, *, resume_from: Path | None = None) -> None:
        self.run = run
        self.tracker = tracker
        self.schedule = run.config.train_evaluation
        self._own_use_cache = getattr(run.model.config, "use_cache", None)
        self._evaluated: dict[tuple[int, str], Evaluation | None] = {}
        self._is_saved = False
        self.interruption = Interruption()
        self.reporter = Reporter(self)
        self.trainer = self._make_trainer()
        base = tracker.run_path / "checkpoints"
        self.going_on = None if resume_from is None else GoingOn(resume_from, run, base)
        self._frozen = digests(run)

    def train_and_eval(self) -> None:
        """The whole run; if it ends early, it saves what it can go on from, or the model as it stands."""
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
        if self.going_on is None:
            with self.interruption.at_any_moment():
                self._check_best_metric(self.evaluate(("val", "test")))
            with self.interruption.finishing("this step"), in_part("update"):
                self.trainer.train()
        else:
            with self.interruption.finishing("this step"), in_part("update"):
                self.trainer.go_on(self.going_on)
        self.trainer.keep_best_alone()
        if self.schedule.save_model:
            with self.interruption.finishing("the model of this run"):
                self.save_whole(self.tracker.run_path / "model")
        if self._is_best_loaded():
            self._evaluated.pop((self.step, "val"), None)
        with self.interruption.at_any_moment():
            self.evaluate(("val", "test"))
        forget_interrupted(self.tracker.checkpoint_base_path)

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
            if (found := self._evaluated[self.step, split]) is not None:  # before the run went on
                evaluations[split] = found
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
            raise RL4LMsLikeError(f"cannot save the model to {folder}: {reason(error)}") from error
        finally:
            model.config.use_cache = in_training

    def save_whole(self, folder: Path) -> None:
        """As `save`; there is all of it or nothing.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        try:
            write_folder(folder, self.save)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot save the model to {folder}: {reason(error)}") from error

    # --- where a run goes on ----------------------------------------------------------------------------------------

    def write_checkpoint(self, name: str) -> None:
        """Writes the model, and what the run can go on from unless `save_only_model` asks for the model alone.

        Args:
            name: of the folder, `checkpoint-{}` or `interrupted_{:05d}`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        base, step = self.tracker.checkpoint_base_path, self.step
        self.trainer.store_flos()

        def save(folder: Path) -> None:
            self.save_checkpoint(folder)
            save_trainer_state(self.trainer, folder)

        try:
            if self.trainer.args.save_only_model:
                write_folder(base / name.format(step), save)
                return
            state = take(self.trainer, before_step=name == INTERRUPTED)
            state.numbers["trainer"]["evaluated"] = sorted(self._evaluated)
            state.numbers.update({"frozen": self._frozen, "config": to_json(self.tracker.run_config)})
            state.numbers["files"] = self.tracker.file_sizes()
            write_checkpoint(base, step, state, save, name=name)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot save a checkpoint in {base}: {reason(error)}") from error

    def cut_files(self) -> None:
        """Takes away what was written after the checkpoint that the run goes on from; everything is put back now."""
        found = self.going_on
        assert found is not None
        self._evaluated = dict.fromkeys(found.evaluated)
        check_sizes(self.tracker.run_path, found.state.numbers["files"])
        others = skipped(self.tracker.checkpoint_base_path, found.step)
        forget_later(self.tracker.checkpoint_base_path, found.step, interrupted=ended_early(found.folder))
        self.trainer.remove_older()
        self.tracker.cut_files(found.state.numbers["files"])  # last: a later checkpoint would miss the lines
        self.tracker.log_info(f"going on after step {found.step}, from {found.folder}{others}")
        for notice in rounding_notices(found.state.numbers["config"], self.tracker.run_config):
            self.tracker.log_info(notice)

    def may_stop(self) -> None:
        """Between two steps: saves everything and stops, if it was asked to.

        Raises:
            KeyboardInterrupt: there was a signal.
        """
        if self.interruption.requests == 1 and self.schedule.save_model:
            self.reporter.flush()
            self.write_checkpoint(INTERRUPTED)
            self._is_saved = True
        self.interruption.check()

    def _rescue(self, error: BaseException) -> None:
        """Saves the model of a run that ends early, and what it last logged; what fails does not hide why it ended."""
        try:
            self.reporter.flush()
        except (RL4LMsLikeError, OSError) as failure:
            logger.warning("the last numbers are lost: %s", failure)
        if self.interruption.requests > 1:
            self.tracker.log_info("stopped at once: what was done since the last checkpoint is lost")
        elif self.step and self.schedule.save_model and not self._is_saved:
            save_interrupted(self.tracker, self.save, self.step, "steps")
        tell_the_way_on(self.tracker, error)

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
