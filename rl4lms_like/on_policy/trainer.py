"""Training loop: evaluate, repeat rollout and update with evaluations and checkpoints on schedule, evaluate again.

    _train_and_eval   evaluate ─ pretrain the critic? ─ n_iters x [iteration ─ evaluate? ─ checkpoint?] ─ save, evaluate
    _iterate          rollout ─ update ─ callbacks, those of the user last ─ log ─ mark the state to resume from

An iteration calls `learn_iteration` of the algorithm (`rollouts.text_rollouts`), which calls `RolloutCollector.collect`
(`rollouts.collector`) and then `train` (`algorithms.base`). `on_policy.resume_point` has a table of the parts of a
checkpoint and their owners, and says when they are captured.

In the run's files (not in `algorithms`, where it is a pass over a rollout), an epoch is the number of completed
iterations: 0 before training, `n_iters` after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl4lms_like.callbacks.base import Callback, RunContext
from rl4lms_like.core.sample import Sample
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.on_policy.best_model import BestModel
from rl4lms_like.on_policy.doctor.callback import Doctor
from rl4lms_like.on_policy.early_stopping import EarlyStopping
from rl4lms_like.on_policy.replay import Replay, origin_of
from rl4lms_like.on_policy.resume_point import ResumePoint
from rl4lms_like.on_policy.rollout_files import Recorder, delete_later_rollouts
from rl4lms_like.on_policy.sample_responses import sample_responses
from rl4lms_like.on_policy.token_credit import TokenCredit
from rl4lms_like.rollouts.text_rollouts import RunHooks
from rl4lms_like.system.disk import saving
from rl4lms_like.system.interruption import Interruption
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.rollouts import CRITIC, ITERATION
from rl4lms_like.training.averages import SPLITS, average_of, save_average
from rl4lms_like.training.evaluation import Evaluation, Responder, evaluate_on_samples
from rl4lms_like.training.inputs import dialogue_settings
from rl4lms_like.training.resuming.checkpoints import FOLDER, delete_interrupted, write_folder
from rl4lms_like.training.user_callbacks import user_callbacks


class OnPolicyTrainer:
    """Train and evaluate a run.

    Args:
        run: returned by `assemble`.
        tracker: writes metrics and files.
        resume_from: a checkpoint of the same run, to resume from.
        keep_last_state: write a checkpoint after the last iteration in any case, so that a finished run can be
            continued to more iterations.

    Attributes:
        current_iter: completed iterations.
        evaluated: (completed iterations, split) pairs that are evaluated already.
        callbacks: called after each iteration and evaluation, in this order; by the names of their states in
            checkpoints.
        user_callbacks: the callbacks of the config, which are the last of these.
        average: average of the trained weights; None without `train_evaluation.average`.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another run.
        ConfigError: the rollouts of `train_evaluation.replay` cannot be used with this config.
    """

    def __init__(
        self,
        run: AssembledRun,
        tracker: Tracker,
        *,
        resume_from: Path | None = None,
        keep_last_state: bool = False,
    ) -> None:
        self.run = run
        self.tracker = tracker
        self.keep_last_state = keep_last_state
        self.schedule = run.config.train_evaluation
        self.interruption = Interruption(run.ranks)
        self.callbacks: dict[str, Callback] = {
            "best_model": BestModel(run, tracker, self.save),
            "doctor": Doctor(run, tracker),
            "token_credit": TokenCredit(run, tracker),
        }
        self.early_stopping: EarlyStopping | None = None
        if self.schedule.early_stopping is not None:
            self.early_stopping = EarlyStopping(self.schedule.early_stopping, run, tracker)
            self.callbacks["early_stopping"] = self.early_stopping

        # After the built-in ones, which have then recorded the iteration even if a user's fails.
        context = RunContext(
            run.config, run.policy.policy_model, run.tokenizer, tracker.run_path, is_main=run.ranks.is_main
        )
        self.user_callbacks = user_callbacks(run.config, run.callbacks, context, run.ranks)
        if run.callbacks:
            self.callbacks["user"] = self.user_callbacks
        self.average = average_of(self.schedule.average, run.policy.policy_model)

        self.current_iter = 0
        self.evaluated: set[tuple[int, str]] = set()
        self._iteration_start: float | None = None  # seconds of `time.perf_counter`; None between two iterations
        self._seconds_before = 0.0  # seconds that an interrupted process has spent on the current iteration

        # Before a checkpoint is loaded: the origin of kept rollouts is a digest of the weights at the start.
        self._attach_replay_and_recorder()
        self.resume_point = ResumePoint(
            run,
            tracker,
            self.interruption,
            trainer=self,
            callbacks=self.callbacks,
            save_model=self.save,
            average=self.average,
        )
        run.algorithm.set_logger(tracker.make_sb3_logger(run.algorithm.verbose))
        if resume_from is not None:
            self.resume_point.resume(resume_from)

        # A run that resumes inside an update already has the rollout of that iteration.
        if run.ranks.is_main:
            n_iteration_rollouts = self.current_iter + (run.algorithm.update_progress is not None)
            n_critic_rollouts = self._rollout_number(is_critic=True) - 1
            delete_later_rollouts(tracker.run_path, {ITERATION: n_iteration_rollouts, CRITIC: n_critic_rollouts})

    def train_and_eval(self) -> None:
        """Train and evaluate; if the run ends early, also by a signal, save the state to resume from."""
        with self.interruption:
            try:
                self._train_and_eval()
            except BaseException as error:
                self.resume_point.rescue(error)
                self.user_callbacks.warn()
                raise

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _train_and_eval(self) -> None:
        # The untrained model is evaluated first, but not the model of a run that resumes inside an update: its weights
        # are those of no completed iteration. The loop below then begins with the rest of that update.
        algorithm = self.run.algorithm
        if algorithm.has_unfinished_update:
            algorithm.continue_update_next()
        else:
            # `is_saved` stays: `resume` has set it to whether a checkpoint of this iteration exists.
            self.resume_point.mark(is_saved=self.resume_point.is_saved)
            self._evaluate_and_save()
        self._pretrain_critic()

        self.tracker.start(self.schedule.n_iters, completed=self.current_iter)
        while self.current_iter < self.schedule.n_iters and not self._stops_early:
            self._iterate()
            self._evaluate_and_save()

        # Before the last evaluations, which a run that is continued makes only after its last iteration.
        if self.keep_last_state and self.schedule.save_model and self.current_iter and not self.resume_point.is_saved:
            with self.interruption.finishing("this checkpoint"):
                self.checkpoint()

        # Before the last evaluation: a metric that fails must not cost the model.
        if self.schedule.save_model:
            folder = self.tracker.run_path / "model"
            with self.interruption.finishing("the model of this run"), saving(f"the model to {folder}"):
                self._write(folder, self.save)
            save_average(self.average, lambda folder: self._write(folder, self.save), self.tracker, self.interruption)
            self.user_callbacks.check()
        self.evaluate(("val", "test"))
        self._evaluate_average()
        if self.run.ranks.is_main:
            delete_interrupted(self.tracker.run_path / FOLDER)

    @property
    def _stops_early(self) -> bool:
        """True if the score on `val` no longer improves, and the config asks for that to end the training."""
        return self.early_stopping is not None and self.early_stopping.is_over

    def _iterate(self) -> None:
        """Run an iteration: rollout and update, then the callbacks, whose numbers are logged with those of both."""
        algorithm = self.run.algorithm
        ranks = self.run.ranks
        iteration = self.current_iter + 1  # from 1, as in all files

        # The time that an interrupted process has spent on this iteration counts as well.
        self._iteration_start = time.perf_counter() - self._seconds_before
        self._seconds_before = 0.0
        waited_before = ranks.waited

        # At the start of an update and after each of its steps, the algorithm calls `mark_in_update`, which captures
        # the state to resume from, and ends the run by an exception if an interruption was requested.
        hooks = RunHooks(self.interruption, on_step=self._on_step, on_rollout_end=self._on_rollout_end)
        algorithm.learn_iteration(self.current_iter, self.schedule.n_iters, hooks)
        seconds = time.perf_counter() - self._iteration_start

        logger = algorithm.logger
        logger.record("time/iteration", iteration)
        logger.record("time/iteration_s", seconds)
        logger.record("time/tokens_per_s", algorithm.rollout_buffer.n_tokens / seconds)
        if ranks.size > 1:
            logger.record("time/communication_s", ranks.waited - waited_before)

        for callback in self.callbacks.values():
            callback.on_iteration_end(iteration)
        self._record_numbers_of_user()
        logger.dump(step=algorithm.num_timesteps)

        # The iteration is complete. `mark` may fail, if a component's state cannot be captured. So `clear` comes first:
        # the state inside the update must not be saved under the new number.
        self.current_iter = iteration
        self._iteration_start = None
        algorithm.end_update()
        self.resume_point.clear()
        if self.average is not None:
            self.average.update(iteration)
        self.resume_point.mark()
        self.user_callbacks.check()

    def _on_rollout_end(self) -> None:
        """Call the users' callbacks on the rollout in the buffer; `_on_step` raises their exceptions."""
        self.user_callbacks.on_rollout_end(self.current_iter + 1, self.run.algorithm.rollout_buffer)
        self._record_numbers_of_user()

    def _on_step(self) -> None:
        """Capture the state within an update, from which a run resumes that ends here."""
        self.resume_point.mark_in_update()
        self.user_callbacks.check()

    def _record_numbers_of_user(self) -> None:
        """Log the numbers of the users' callbacks with those of the iteration."""
        for key, number in self.user_callbacks.pop_numbers().items():
            self.run.algorithm.logger.record(key, number)

    def _evaluate_and_save(self) -> None:
        """Run the evaluations and write the checkpoint that are due after this number of iterations, each once."""
        completed = self.current_iter
        if completed % self.schedule.eval_every == 0:
            self.evaluate(("val",) if completed else ("val", "test"))  # test only before and after the training
            if responses := sample_responses(self.run):
                self.tracker.log_responses(completed, responses)

        is_due = completed > 0 and completed % self.schedule.save_every == 0
        if is_due and self.schedule.save_model and not self.resume_point.is_saved:
            with self.interruption.finishing("this checkpoint"):
                self.checkpoint()
        self.interruption.check()

    # --- evaluation and files ---------------------------------------------------------------------------------------

    def evaluate(self, splits: tuple[str, ...]) -> dict[str, Evaluation]:
        """Evaluate splits that have samples and are not evaluated yet after this iteration; return the evaluations."""
        evaluations = {}
        for split in splits:
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples or (self.current_iter, split) in self.evaluated:
                continue

            # Nothing is lost if a signal stops it at once: a resumed run evaluates this split again.
            with self.interruption.at_any_moment():
                evaluation = self._evaluate_split(split, samples)
            self.evaluated.add((self.current_iter, split))
            self.tracker.log_metrics(self.current_iter, split, evaluation.scores)
            self.tracker.log_predictions(self.current_iter, split, evaluation.predictions)
            for callback in self.callbacks.values():
                callback.on_evaluation_end(self.current_iter, split, evaluation)
            evaluations[split] = evaluation
            self.resume_point.mark()
            self.user_callbacks.check()
            self.interruption.check()
        return evaluations

    def _evaluate_average(self) -> None:
        """Evaluate the averaged model on `val` and `test`, each once after the last iteration."""
        if self.average is None or not self.average.last:
            return
        for split, logged_split in SPLITS.items():
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples or (self.current_iter, logged_split) in self.evaluated:
                continue
            with self.average.in_model(), self.interruption.at_any_moment():
                evaluation = self._evaluate_split(split, samples)
            self.evaluated.add((self.current_iter, logged_split))
            self.tracker.log_metrics(self.current_iter, logged_split, evaluation.scores)
            self.tracker.log_predictions(self.current_iter, logged_split, evaluation.predictions)
            self.resume_point.mark()

    def _evaluate_split(self, split: str, samples: list[Sample]) -> Evaluation:
        responder = Responder(
            self.run.policy,
            self.run.tokenizer,
            batch_size=self.schedule.eval_batch_size,
            max_prompt_length=self.run.max_prompt_length,
            eos_token_ids=sorted(self.run.env.get_attr("eos_token_ids", [0])[0]),
            dialogue=dialogue_settings(self.run.config, self.run.tokenizer),
            generation_kwargs=self.schedule.generation_kwargs,
            seed=self.run.config.seed,
            ranks=self.run.ranks,
        )

        # Processes have different numbers of batches, and metrics may use the model. With an engine it stays split.
        with self.run.policy.gathered():
            return evaluate_on_samples(responder, samples, self.run.metrics, split_name=split)

    def checkpoint(self) -> Path:
        """Write a checkpoint that the run can resume from, with the model ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        folder = self.resume_point.write()
        self.user_callbacks.check()
        return folder

    def save(self, folder: Path) -> Path:
        """Write the language model and the tokenizer, ready for `from_pretrained`, with the files of callbacks.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        self.run.save_model(folder)
        self.user_callbacks.on_save(folder)
        return folder

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the loop, in JSON's types; within an iteration with the seconds spent on it."""
        state: dict[str, Any] = {"iteration": self.current_iter, "evaluated": sorted(self.evaluated)}
        if self._iteration_start is not None:
            state["seconds"] = time.perf_counter() - self._iteration_start
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.current_iter = state["iteration"]
        self.evaluated = {(epoch, split) for epoch, split in state["evaluated"]}
        self._seconds_before = state.get("seconds", 0.0)

    def _write(self, folder: Path, save: Callable[[Path], Any]) -> None:
        """Write a model's folder in the main process; all processes must call this, since weights may be split."""
        with self.run.policy.led_by_main():
            if self.run.ranks.is_main:
                write_folder(folder, save)

    # --- replay and recorder, pretraining of the critic -------------------------------------------------------------

    def _attach_replay_and_recorder(self) -> None:
        """Let the collector replay or keep rollouts, as configured; the weights must be those at the start."""
        if not self.schedule.save_rollouts and self.schedule.replay is None:
            return
        origin = origin_of(self.run)

        replay = None
        if self.schedule.replay is not None:
            replay = Replay(self.run, self.tracker.run_config, self._rollout_number, origin)
            self.tracker.log_info(str(replay.plan))
            # These rollouts are not of this run's policy: if they are recorded again, its weights are not their origin.
            if replay.is_off_policy:
                origin = {name: digest for name, digest in origin.items() if name != "weights"}

        recorder = None
        if self.schedule.save_rollouts and self.run.ranks.is_main:
            recorder = Recorder(self.run, self.tracker.run_path, self._rollout_number, origin)
        self.run.algorithm.collector.attach(replay=replay, recorder=recorder)

    def _rollout_number(self, is_critic: bool) -> int:
        """Return the number of the next rollout, of the critic's pretraining or of the iterations."""
        if not is_critic:
            return self.current_iter + 1
        pretraining = self.run.algorithm.pretraining
        return 1 if pretraining is None else len(pretraining.explained) + 1

    def _pretrain_critic(self) -> None:
        """Train the critic on rollouts of the starting policy if the config asks for it, and save it."""
        algorithm = self.run.algorithm
        pretraining = algorithm.pretraining
        has_trained = algorithm.num_timesteps > 0 or algorithm.update_progress is not None
        if pretraining is None or has_trained:  # an update has changed the critic since
            return

        for explained in algorithm.pretrain_critic(self.interruption):
            self.resume_point.mark()
            self.tracker.log_info(pretraining.progress(explained))
            self.interruption.check()
        if self.schedule.save_model:
            folder = self.tracker.run_path / "critic"
            with self.interruption.finishing("the critic"), saving(f"the critic to {folder}"):
                self._write(folder, self.run.policy.save_critic)
