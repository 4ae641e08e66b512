"""The run: evaluate, then iterations of rollout and update, evaluating and saving on schedule, then evaluate again.

An epoch in the files is a number of completed iterations: 0 before training, `n_iters` after it.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path

from rl4lms_like.core.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.run_folder import to_json
from rl4lms_like.training import snapshot
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.checkpoints import forget_later, read_checkpoint, write_checkpoint, write_folder
from rl4lms_like.training.evaluation import Evaluation, evaluate_on_samples
from rl4lms_like.training.interrupted import save_interrupted, tell_the_way_on
from rl4lms_like.training.watchers import watchers_of


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
        self._evaluated: set[tuple[int, str]] = set()
        self.watchers = watchers_of(run, tracker)
        snapshot.remembered(run)  # what cannot be saved is said now, not at the first checkpoint
        run.algorithm.set_logger(tracker.make_sb3_logger(run.algorithm.verbose))
        if resume_from is not None:
            self._resume(resume_from)

    def train_and_eval(self) -> None:
        """The whole run; if it ends early, it saves the model as it stands."""
        if self.current_iter == 0:
            self.evaluate(("val", "test"))
        self.tracker.start(self.schedule.n_iters, completed=self.current_iter)
        try:
            while self.current_iter < self.schedule.n_iters:
                self._iterate(self.schedule.n_iters)
                if self.current_iter % self.schedule.eval_every == 0:
                    self.evaluate(("val",))
                if self.current_iter % self.schedule.save_every == 0 and self.schedule.save_model:
                    self.checkpoint()
        except BaseException:
            self._rescue()
            raise
        if self.schedule.save_model:
            self._save_whole(self.tracker.run_path / "model")
        self.evaluate(("val", "test"))

    def _rescue(self) -> None:
        """Saves the model of a run that ends early."""
        if self.current_iter and self.schedule.save_model:
            save_interrupted(self.tracker, self.save, self.current_iter, "iterations")
        tell_the_way_on(self.tracker)

    def _iterate(self, n_iters: int) -> None:
        algorithm = self.run.algorithm
        start, tokens = time.perf_counter(), algorithm.num_timesteps
        algorithm.learn_iteration(self.current_iter, n_iters)
        self.current_iter += 1
        seconds = time.perf_counter() - start
        algorithm.logger.record("time/iteration", self.current_iter)
        algorithm.logger.record("time/iteration_s", seconds)
        algorithm.logger.record("time/tokens_per_s", (algorithm.num_timesteps - tokens) / seconds)
        for watcher in self.watchers.values():
            watcher.saw_iteration(self.current_iter)
        algorithm.logger.dump(step=algorithm.num_timesteps)

    def evaluate(self, splits: tuple[str, ...]) -> dict[str, Evaluation]:
        """Evaluates on splits that have samples, once for each number of completed iterations."""
        evaluations = {}
        for split in splits:
            samples = self.run.samples[split][: self.schedule.max_eval_samples]
            if not samples or (self.current_iter, split) in self._evaluated:
                continue
            self._evaluated.add((self.current_iter, split))
            evaluation = evaluate_on_samples(
                self.run.policy.writer,
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
            self.tracker.log_metrics(self.current_iter, split, evaluation.scores)
            self.tracker.log_predictions(self.current_iter, split, evaluation.predictions)
            for watcher in self.watchers.values():
                watcher.saw_evaluation(self.current_iter, split, evaluation)
            evaluations[split] = evaluation
        return evaluations

    def checkpoint(self) -> Path:
        """Writes everything that the run can go on from, and the model, ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        state = snapshot.take(self.run, self._frozen)
        state.numbers["trainer"] = {"iteration": self.current_iter, "evaluated": sorted(self._evaluated)}
        state.numbers["watchers"] = {name: watcher.state_dict() for name, watcher in self.watchers.items()}
        try:
            state.numbers["files"] = self.tracker.file_sizes()
            state.numbers["config"] = to_json(self.tracker.run_config)
            return write_checkpoint(self.tracker.checkpoint_base_path, self.current_iter, state, self.save)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot write the checkpoint of iteration {self.current_iter}: {error}") from error

    def _resume(self, checkpoint: Path) -> None:
        state = read_checkpoint(checkpoint)
        snapshot.put_back(self.run, state, self._frozen)
        self.current_iter = state.numbers["trainer"]["iteration"]
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
        self.tracker.cut_files(state.numbers.get("files", {}))
        forget_later(self.tracker.checkpoint_base_path, self.current_iter)
        self.tracker.log_info(f"going on after iteration {self.current_iter}, from {checkpoint}")

    @cached_property
    def _frozen(self) -> dict[str, str]:
        return snapshot.digests(self.run)

    def _save_whole(self, folder: Path) -> None:
        try:
            write_folder(folder, self.save)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot save the model to {folder}: {error}") from error

    def save(self, folder: Path) -> Path:
        """Writes the language model and the tokenizer, ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        try:
            return Path(self.run.policy.save_model(folder, self.run.tokenizer))
        except OSError as error:
            raise RL4LMsLikeError(f"cannot save the model to {folder}: {error}") from error
