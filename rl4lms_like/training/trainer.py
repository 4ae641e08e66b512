"""The run: evaluate, then iterations of rollout and update, evaluating and saving on schedule, then evaluate again.

An epoch in the files is a number of completed iterations: 0 before training, `n_iters` after it.
"""

from __future__ import annotations

import copy
import logging
import time
from functools import cached_property
from pathlib import Path

from rl4lms_like.core.disk import naming, reason
from rl4lms_like.core.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.core.interruption import Interruption
from rl4lms_like.core.sample import Sample
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.run_folder import check_sizes, to_json
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.evaluation import Evaluation, evaluate_on_samples
from rl4lms_like.training.resuming import snapshot
from rl4lms_like.training.resuming.checkpoints import (
    INTERRUPTED,
    ITERATION,
    MANIFEST,
    TrainingState,
    ended_early,
    forget_interrupted,
    forget_later,
    read_checkpoint,
    skipped,
    write_checkpoint,
    write_folder,
)
from rl4lms_like.training.resuming.interrupted import save_interrupted, tell_the_way_on
from rl4lms_like.training.resuming.resume import rounding_notices
from rl4lms_like.training.watchers import watchers_of

logger = logging.getLogger(__name__)


class OnPolicyTrainer:
    """Trains and evaluates a run.

    Args:
        run: what `assemble` built.
        tracker: where numbers and files go.
        resume_from: a checkpoint of the same run, to go on from.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another run.
    """

    def __init__(self, run: Run, tracker: Tracker, *, resume_from: Path | None = None) -> None:
        self.run = run
        self.tracker = tracker
        self.schedule = run.config.train_evaluation
        self.current_iter = 0
        self.interruption = Interruption()
        self._evaluated: set[tuple[int, str]] = set()
        self._moment: TrainingState | None = None
        self._is_saved = False
        self._began = self._seconds_before = 0.0
        self.watchers = watchers_of(run, tracker)
        snapshot.remembered(run)  # what cannot be saved is said now, not at the first checkpoint
        run.algorithm.set_logger(tracker.make_sb3_logger(run.algorithm.verbose))
        run.algorithm.interruption, run.algorithm.on_step = self.interruption, self._reached_in_update
        if self.schedule.save_model:
            _ = self._frozen  # taken before a reward or a metric may change the samples
        if resume_from is not None:
            self._resume(resume_from)

    def train_and_eval(self) -> None:
        """The whole run; if it ends early, also by Ctrl-C or SIGTERM, it saves what it goes on from."""
        with self.interruption:
            try:
                self._train_and_eval()
            except BaseException as error:
                self._rescue(error)
                raise

    def _train_and_eval(self) -> None:
        if not self.run.algorithm.goes_on_with_update():
            self._reached(is_saved=self._is_saved)
            self._do_what_is_due()
        self.tracker.start(self.schedule.n_iters, completed=self.current_iter)
        while self.current_iter < self.schedule.n_iters:
            self._iterate(self.schedule.n_iters)
            self._do_what_is_due()
        if self.schedule.save_model:
            with self.interruption.finishing("the model of this run"):
                self._save_whole(self.tracker.run_path / "model")
        self.evaluate(("val", "test"))
        forget_interrupted(self.tracker.run_path / "checkpoints")

    def _do_what_is_due(self) -> None:
        """Evaluations and the checkpoint that belong to this number of iterations, each once."""
        if self.current_iter % self.schedule.eval_every == 0:
            self.evaluate(("val",) if self.current_iter else ("val", "test"))
        is_due = self.current_iter > 0 and self.current_iter % self.schedule.save_every == 0
        if is_due and self.schedule.save_model and not self._is_saved:
            with self.interruption.finishing("this checkpoint"):
                self.checkpoint()
        self.interruption.check()

    def _iterate(self, n_iters: int) -> None:
        algorithm = self.run.algorithm
        self._began = time.perf_counter() - self._seconds_before
        algorithm.learn_iteration(self.current_iter, n_iters)
        seconds, self._seconds_before = time.perf_counter() - self._began, 0.0
        algorithm.logger.record("time/iteration", self.current_iter + 1)
        algorithm.logger.record("time/iteration_s", seconds)
        algorithm.logger.record("time/tokens_per_s", algorithm.rollout_buffer.n_tokens / seconds)
        for watcher in self.watchers.values():
            watcher.saw_iteration(self.current_iter + 1)
        algorithm.logger.dump(step=algorithm.num_timesteps)
        self.current_iter += 1
        algorithm.update = self._moment = None
        self._reached()

    # --- where a run goes on that ends early ------------------------------------------------------------------------

    def _reached(self, *, is_saved: bool = False) -> None:
        """A run that ends from here on, up to the next such place, goes on from here."""
        moment = snapshot.light(self.run)
        moment.numbers["trainer"] = {"iteration": self.current_iter, "evaluated": sorted(self._evaluated)}
        watchers = {name: watcher.state_dict() for name, watcher in self.watchers.items()}
        moment.numbers["watchers"] = copy.deepcopy(watchers)
        moment.numbers["files"] = self.tracker.file_sizes(on_disk=False)
        self._moment, self._is_saved = moment, is_saved

    def _reached_in_update(self) -> None:
        """As `_reached`, between two steps; here the run stops if it was asked to."""
        if self._moment is None or "update" not in self._moment.numbers:
            self._reached()
        assert self._moment is not None
        self._moment, self._is_saved = snapshot.in_update(self.run, self._moment), False
        self._moment.numbers["trainer"] |= {"seconds": time.perf_counter() - self._began}
        self.interruption.check()

    def _rescue(self, error: BaseException) -> None:
        """Saves what the run goes on from, unless there is nothing that would be lost."""
        update, moment = self.run.algorithm.update, self._moment
        is_fresh = self.current_iter == 0 and update is None and isinstance(error, Exception)
        try:
            if self.interruption.requests > 1:
                return
            if not self.schedule.save_model:
                self.tracker.log_info("nothing is saved of this run: train_evaluation.save_model is false")
            elif moment is None or (update is not None and not ("update" in moment.numbers and update.can_go_on)):
                save_interrupted(self.tracker, self.save, self.current_iter, "iterations")
            elif not self._is_saved and not is_fresh:
                self._save_moment(moment)
        finally:
            if self.interruption.requests > 1:
                self.tracker.log_info("stopped at once: what was done since the last checkpoint is lost")
            tell_the_way_on(self.tracker, error)

    def _save_moment(self, moment: TrainingState) -> None:
        """A failure to do so does not hide why the run ended."""
        try:
            folder = self._write(moment, INTERRUPTED)
        except Exception as error:
            logger.warning("what the run goes on from could not be saved: %s: %s", type(error).__name__, error)
        else:
            self.tracker.log_info(f"interrupted after {self.current_iter} iterations; all of it is in {folder}")

    def evaluate(self, splits: tuple[str, ...]) -> dict[str, Evaluation]:
        """Evaluates on splits that have samples, once for each number of completed iterations."""
        evaluations = {}
        for split in splits:
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples or (self.current_iter, split) in self._evaluated:
                continue
            with self.interruption.at_any_moment():
                evaluation = self._evaluation(split, samples)
            self._evaluated.add((self.current_iter, split))
            self.tracker.log_metrics(self.current_iter, split, evaluation.scores)
            self.tracker.log_predictions(self.current_iter, split, evaluation.predictions)
            for watcher in self.watchers.values():
                watcher.saw_evaluation(self.current_iter, split, evaluation)
            evaluations[split] = evaluation
            self._reached()
            self.interruption.check()
        return evaluations

    def _evaluation(self, split: str, samples: list[Sample]) -> Evaluation:
        return evaluate_on_samples(
            self.run.policy,
            self.run.tokenizer,
            samples,
            self.run.metrics,
            split_name=split,
            batch_size=self.schedule.eval_batch_size,
            max_prompt_length=self.run.max_prompt_length,
            eos_token_ids=sorted(self.run.env.get_attr("eos_token_ids", [0])[0]),
            generation_kwargs=self.schedule.generation_kwargs,
            seed=self.run.config.seed,
        )

    def checkpoint(self) -> Path:
        """Writes everything that the run can go on from, and the model, ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        self._reached()
        assert self._moment is not None
        folder = self._write(self._moment, ITERATION)
        self._is_saved = True
        return folder

    def _write(self, moment: TrainingState, name: str) -> Path:
        state = snapshot.take(self.run, moment, self._frozen)
        try:
            self.tracker.file_sizes()  # their lines are on the disk now
            state.numbers["config"] = to_json(self.tracker.run_config)
            base, keep = self.tracker.checkpoint_base_path, self.schedule.keep_last
            with naming(base / name.format(self.current_iter)):
                return write_checkpoint(base, self.current_iter, state, self.save, name=name, keep=keep)
        except OSError as error:
            what = f"the checkpoint of iteration {self.current_iter}"
            raise RL4LMsLikeError(f"cannot write {what}: {reason(error)}") from error

    def _resume(self, checkpoint: Path) -> None:
        state = read_checkpoint(checkpoint)
        snapshot.put_back(self.run, state, self._frozen)
        self.current_iter = state.numbers["trainer"]["iteration"]
        self._seconds_before = state.numbers["trainer"].get("seconds", 0.0)
        try:
            self._evaluated = {(epoch, split) for epoch, split in state.numbers["trainer"]["evaluated"]}
            if not all(type(epoch) is int and split in self.run.samples for epoch, split in self._evaluated):
                raise ValueError("trainer.evaluated names no epochs and splits")
            if state.numbers["watchers"].keys() != self.watchers.keys():
                raise ValueError("watchers are not those of the run")
            for name, watcher in self.watchers.items():
                watcher.load_state_dict(state.numbers["watchers"][name])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: cannot be read: {type(error).__name__}: {error}") from error
        base, files = self.tracker.checkpoint_base_path, state.numbers.get("files", {})
        check_sizes(self.tracker.run_path, files)
        others = skipped(base, self.current_iter)
        forget_later(base, self.current_iter, self.schedule.keep_last, interrupted=ended_early(checkpoint))
        self.tracker.cut_files(files)  # last: a later checkpoint would miss the lines
        self._is_saved = (base / ITERATION.format(self.current_iter) / MANIFEST).is_file()
        where = f"in iteration {self.current_iter + 1}" if "update" in state.numbers else f"after {self.current_iter}"
        self.tracker.log_info(f"going on {where}, from {checkpoint}{others}")
        for notice in rounding_notices(state.numbers["config"], self.tracker.run_config):
            self.tracker.log_info(notice)

    @cached_property
    def _frozen(self) -> dict[str, str]:
        return snapshot.digests(self.run)

    def _save_whole(self, folder: Path) -> None:
        try:
            write_folder(folder, self.save)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot save the model to {folder}: {reason(error)}") from error

    def save(self, folder: Path) -> Path:
        """Writes the language model and the tokenizer, ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        try:
            return Path(self.run.policy.save_model(folder, self.run.tokenizer))
        except OSError as error:
            raise RL4LMsLikeError(f"cannot save the model to {folder}: {reason(error)}") from error
