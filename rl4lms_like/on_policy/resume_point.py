"""Point from which a run resumes: which parts a checkpoint has, who owns each, when it is captured and restored.

    iterations, evaluations, critic's pretraining ─ mark ─┐
                    steps of an update ─ mark_in_update ─┴─ the run ends ─ rescue ─> checkpoints/interrupted_00003
                                                             save_every ── write ──> checkpoints/iteration_00003

    part          owner                           what it has
    trainer       OnPolicyTrainer                 completed iterations, finished evaluations
    algorithm     AlgorithmPart                   tokens, updates, KL coefficient, order of minibatches, seeds
    env           EnvironmentPart                 position in the prompts; state of a reward with `state_dict`
    metrics       MetricsPart                     state of metrics with `state_dict`
    watchers      CallbacksPart                   state of the callbacks
    random        states.random_state             Python's, NumPy's and torch's global generators
    ranks         the other processes             their generators and rewards
    files         Tracker.file_sizes              sizes of the run's files, to which a resumed run cuts them
    update        UpdateProgress, EpisodeBuffer   rollout and completed steps of an interrupted update
    ahead         NextRollouts                    the next rollouts' episodes, if they are generated during updates
    weights       policy.training_state           trained parameters, buffers, NLPO's mask model
    average       WeightAverage                   average of the trained weights, if the run has one
    optimizer     states.optimizer_state          moments and steps, learning rates

`mark` captures the parts down to `files` as copies, `mark_in_update` replaces those that an update changes. Tensors are
read only when a checkpoint is written: weights and optimizer, the rollout and logged numbers of an unfinished update,
and the episodes of `ahead`. So they must still be those of the captured moment: whatever changes weights calls `clear`
or sets a stage of the update that cannot be resumed (`UpdateStage`). What does not change (a reference model
that is not updated, a frozen base model, the samples) is not saved; digests of it are, with the config.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rl4lms_like.callbacks.base import Callback
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.policies.sharding import with_all
from rl4lms_like.rollouts.ahead import AheadRollout, ahead_state
from rl4lms_like.system.component_state import load_state, not_json, state_of
from rl4lms_like.system.disk import saving, with_filename
from rl4lms_like.system.errors import MetricError, RankError, RewardError
from rl4lms_like.system.interruption import Interruption
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.schema import at
from rl4lms_like.system.secrets import secret_in
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.tracking.run_folder import to_json
from rl4lms_like.training.averages import WeightAverage
from rl4lms_like.training.resuming.checkpoints import (
    INTERRUPTED,
    ITERATION,
    MANIFEST,
    FileDigest,
    TrainingState,
    read_checkpoint,
    write_checkpoint,
    write_rows_of_processes,
)
from rl4lms_like.training.resuming.resume import log_resume_hint, remove_later, save_interrupted, try_to_save
from rl4lms_like.training.resuming.states import (
    check_frozen,
    frozen_digests,
    load_optimizer,
    load_random,
    load_weights,
    optimizer_state,
    random_state,
    restoring,
)
from rl4lms_like.training.run_reward import is_run_reward

ENGINE_TIMEOUT_S = 20.0
"""Seconds that an interrupted run waits for the responses that an engine generates ahead; torchrun kills after 30."""
_ROWS = "rows"
"""Name of the other processes' part of writing a checkpoint."""
TEXTS = "texts of alg.ptx"
"""Description of their digest, as in `frozen_digests`."""


class CheckpointPart(Protocol):
    """Owner of a part of a checkpoint."""

    def state_dict(self) -> Any:
        """Return the state in types that JSON supports."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state returned by `state_dict`, in a run that was just assembled from the same config."""


class AlgorithmPart:
    """State of an algorithm, without the weights of its policy."""

    def __init__(self, run: AssembledRun) -> None:
        self.algorithm = run.algorithm

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's `training_state`."""
        return self.algorithm.training_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.algorithm.load_training_state(state)


class EnvironmentPart:
    """State of the environments and of their reward; restored after the algorithm's, which tells if it has sampled."""

    def __init__(self, run: AssembledRun) -> None:
        self.algorithm = run.algorithm
        self.env: Any = run.env

    def state_dict(self) -> Any:
        """Return the state of a `TextVecEnv`, or those of all environments of another vectorised one.

        Raises:
            RewardError: the reward's state does not survive a round trip through JSON, or contains a secret.
        """
        # A TextVecEnv has one sampler for all its environments.
        if hasattr(type(self.env), "state_dict"):
            state = self.env.state_dict()
            env_states = [state]
        else:
            state = self.env.env_method("state_dict")
            env_states = state

        for env_state in env_states:
            if message := _why_unfit(env_state["reward"]):
                raise RewardError(f"the result of the reward's state_dict() cannot be saved: {message}")
        return state

    def load_state_dict(self, state: Any) -> None:
        """Restore the state returned by `state_dict`."""
        # Before the first prompt, environments may still expect their seed at the first reset.
        if not self.algorithm.has_sampled:
            return

        # Uses up the seed, which must not replace the state that is loaded.
        self.env.reset()
        if isinstance(state, dict):
            self.env.load_state_dict(state)
        else:
            for index, env_state in enumerate(state):
                self.env.env_method("load_state_dict", env_state, indices=[index])


class MetricsPart:
    """States of the metrics, in their order."""

    def __init__(self, metrics: Sequence[BaseMetric]) -> None:
        self.metrics = metrics

    def state_dict(self) -> list[Any]:
        """Return the state of each metric; None for one without state.

        Raises:
            MetricError: a state does not survive a round trip through JSON, or contains a secret.
        """
        states = [state_of(metric) for metric in self.metrics]
        for metric, state in zip(self.metrics, states, strict=True):
            if message := _why_unfit(state):
                raise MetricError(f"the result of {type(metric).__name__}.state_dict() cannot be saved: {message}")
        return states

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore the state returned by `state_dict`."""
        for metric, metric_state in zip(self.metrics, state, strict=True):
            load_state(metric, metric_state)


class CallbacksPart:
    """States of the callbacks, by name."""

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self.callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback."""
        return {name: callback.state_dict() for name, callback in self.callbacks.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`; a callback that the run did not have before begins anew."""
        for name, callback in self.callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])


class ResumePoint:
    """State that a run resumes from: between two iterations, steps of an update, or rollouts of the pretraining.

    Args:
        run: returned by `assemble`.
        tracker: writes the run's files.
        interruption: Ctrl-C and SIGTERM.
        trainer: owner of the part `trainer`, with `iteration`, the number of completed iterations.
        callbacks: by the names of their states.
        save_model: writes the model to a folder.
        average: of the trained weights.

    Attributes:
        parts: owners of the parts that are captured as numbers, in the order in which they are restored.
        is_saved: whether a checkpoint of the captured state exists.

    Raises:
        RewardError: the reward's state does not survive a round trip through JSON, or contains a secret.
        MetricError: the same holds for the state of a metric.
    """

    def __init__(
        self,
        run: AssembledRun,
        tracker: Tracker,
        interruption: Interruption,
        *,
        trainer: CheckpointPart,
        callbacks: Mapping[str, Callback],
        save_model: Callable[[Path], Path],
        average: WeightAverage | None = None,
    ) -> None:
        self.run = run
        self.save_model = save_model
        self.average = average
        self.tracker = tracker
        self.interruption = interruption
        self.schedule = run.config.train_evaluation
        self.parts: dict[str, CheckpointPart] = {
            "algorithm": AlgorithmPart(run),
            "env": EnvironmentPart(run),
            # Without the run's own reward: it has no state, and runs of earlier versions did not report it.
            "metrics": MetricsPart([metric for metric in run.metrics if not is_run_reward(metric)]),
            "trainer": trainer,
            "watchers": CallbacksPart(callbacks),
        }
        self.is_saved = False
        self._state: TrainingState | None = None
        self._ahead: tuple[AheadRollout, ...] = ()

        # A state that cannot be saved is reported now, not at the first checkpoint.
        self.parts["env"].state_dict()
        self.parts["metrics"].state_dict()
        if self.schedule.save_model:
            _ = self._frozen  # computed before a reward or a metric may change the samples

    @cached_property
    def _frozen(self) -> dict[str, str]:
        digests = frozen_digests(self.run.policy, self.run.policy.training_state(), self.run.samples)
        # An algorithm of another library has no texts.
        ptx = getattr(self.run.algorithm, "ptx", None)
        if ptx is not None:
            digests[TEXTS] = ptx.digest()
        return digests

    @property
    def _n_completed(self) -> int:
        """Number of completed iterations."""
        return int(self.parts["trainer"].state_dict()["iteration"])

    @property
    def _is_resumable(self) -> bool:
        """True if the weights are those of the captured state: between iterations, or between steps of an update."""
        update = self.run.algorithm.update_progress
        if self._state is None or update is None:
            return self._state is not None
        return update.is_resumable and "update" in self._state.numbers

    # --- capturing --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Discard the state: the run cannot be resumed in the middle of what follows."""
        self._state = None

    def mark(self, *, is_saved: bool = False) -> None:
        """Capture all but the weights; if the run ends before the next mark, it resumes from here."""
        # The generators first: the state of a user's component may draw from them.
        generators, random_numbers = random_state()
        numbers = {name: part.state_dict() for name, part in self.parts.items()}
        numbers["random"] = random_numbers
        numbers["files"] = self.tracker.file_sizes(on_disk=False)
        rank_numbers, rank_generators = self._of_other_ranks(generators, random_numbers)

        # Copies: components may return objects that they change later.
        numbers = copy.deepcopy(numbers | rank_numbers)
        self._state = TrainingState(numbers, generators | rank_generators)
        self._ahead = self.run.algorithm.collector.next_rollouts.for_checkpoint
        self.is_saved = is_saved

    def mark_in_update(self) -> None:
        """Capture the state between two steps of an update; stop the run here if an interruption was requested.

        An update changes neither the environment nor the metrics, so their states are those at its start.
        """
        if self._state is None or "update" not in self._state.numbers:
            self.mark()
        assert self._state is not None
        update = self.run.algorithm.update_progress
        assert update is not None

        generators, random_numbers = random_state()
        changed = {
            "algorithm": self.parts["algorithm"].state_dict(),
            "trainer": self.parts["trainer"].state_dict(),
            "random": random_numbers,
            "update": update.state_dict(),
        }
        rank_numbers, rank_generators = self._of_other_ranks(generators, random_numbers)
        numbers = self._state.numbers | changed | rank_numbers
        self._state = TrainingState(numbers, generators | rank_generators)
        self.is_saved = False
        self.interruption.check()

    def _of_other_ranks(
        self, generators: dict[str, Tensor], random_numbers: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what may differ between processes, from rank 1 on: numbers under `ranks`, and tensors."""
        if self.run.ranks.size == 1:
            return {}, {}
        env: Any = self.run.env
        _, *others = self.run.ranks.gather((dict(generators), random_numbers, env.state_dict()["reward"]))

        numbers = []
        tensors: dict[str, Tensor] = {}
        for rank, (rank_generators, rank_random, reward) in enumerate(others, 1):
            numbers.append({"random": rank_random, "reward": reward})
            tensors |= {f"rank{rank}.{name}": tensor.cpu() for name, tensor in rank_generators.items()}
        return {"ranks": numbers}, tensors

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self) -> Path:
        """Write the checkpoint of a completed iteration.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        self.mark()
        assert self._state is not None
        if self._ahead:
            self._add_ahead(*ahead_state(self._ahead, self.run.ranks))
        with self._led_by_main():
            if self.run.ranks.is_main:
                self._write(self._state, ITERATION)
        self.is_saved = True
        return self.tracker.checkpoint_base_path / ITERATION.format(self._n_completed)

    def _led_by_main(self) -> AbstractContextManager[None]:
        """Let the main process write a checkpoint within the block; see `led_by_main` of the policy."""
        works = {_ROWS: lambda: write_rows_of_processes(self._weights()[0], self.run.ranks)}
        return self.run.policy.led_by_main(with_optimizer=True, works=works)

    def _weights(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights and the moments of the optimizer, which may be split, and the optimizer's numbers."""
        policy = self.run.policy
        tensors = {f"policy.{name}": tensor for name, tensor in policy.training_state().items()}
        moments, optimizer_numbers = optimizer_state(policy.optimizer)
        return tensors | moments, optimizer_numbers

    def _write_rows(self, folder: Path) -> dict[str, FileDigest]:
        """Let all processes write their rows of the weights and moments."""
        with_all(_ROWS)
        return write_rows_of_processes(self._weights()[0], self.run.ranks, folder)

    def _write(self, captured: TrainingState, name: str) -> Path:
        """Write a captured state together with the weights, which must be those at the time of its capture."""
        weights, optimizer_numbers = self._weights()
        tensors = dict(captured.tensors) | weights
        numbers = dict(captured.numbers)
        numbers["optimizer"] = optimizer_numbers
        numbers["frozen"] = self._frozen
        numbers["config"] = to_json(self.tracker.run_config)

        if self.average is not None:
            numbers["average"] = self.average.state_dict()
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.tensors().items()}

        # An update has its whole rollout in the checkpoint: a resumed run does not generate it again.
        if "update" in numbers:
            numbers["update"], rollout = unfinished_update(self.run.algorithm, numbers["update"])
            tensors |= {f"update.{name}": tensor for name, tensor in rollout.items()}

        base = self.tracker.checkpoint_base_path
        iteration = numbers["trainer"]["iteration"]
        state = TrainingState(numbers, tensors)
        folder = base / name.format(iteration)
        with saving(f"the checkpoint of iteration {iteration} to {folder}"), with_filename(folder):
            # Flushes the run's files to disk: the checkpoint refers to their sizes.
            self.tracker.file_sizes()
            keep = self.schedule.keep_last
            in_parts = self.run.policy.is_sharded and self.run.config.distributed.checkpoint == "split"
            write_rows = self._write_rows if in_parts else None
            return write_checkpoint(
                base, iteration, state, self.save_model, name=name, keep=keep, write_rows=write_rows
            )

    def rescue(self, error: BaseException) -> None:
        """Save the state to resume from when a run ends early, unless nothing would be lost.

        Split weights can be saved only if all processes end together, that is, after an interruption.
        """
        policy = self.run.policy
        ends_together = isinstance(error, KeyboardInterrupt) and self.interruption.requests < 2
        if policy.is_sharded and not ends_together:
            if self.run.ranks.is_main:
                self.tracker.log_info(
                    "progress since the last checkpoint is lost: not all processes have ended together"
                )
                log_resume_hint(self.tracker, error)
            return

        # A second Ctrl-C means: end now, save nothing. It may also come while the state is collected or written.
        try:
            is_written = self.schedule.save_model and self._is_resumable and not self.is_saved
            if self._ahead and is_written and self.interruption.requests <= 1:
                self._add_ahead(*self._ahead_at_end(ends_together))
            with self._led_by_main():
                if self.run.ranks.is_main and self.interruption.requests <= 1:
                    self._save_what_is_there(error)
        finally:
            if self.run.ranks.is_main:
                if self.interruption.requests > 1:
                    self.tracker.log_info("stopped immediately: progress since the last checkpoint is lost")
                log_resume_hint(self.tracker, error)

    def _ahead_at_end(self, ends_together: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the `ahead_state` of a run that ends early.

        Of several processes that do not end together it has only the prompts.
        """
        ranks = self.run.ranks
        if ends_together or ranks.size == 1:
            with suppress(RankError):  # another process was stopped by a second Ctrl-C
                return ahead_state(self._ahead, ranks, ENGINE_TIMEOUT_S)
        return ahead_state([rollout.without_responses() for rollout in self._ahead], Ranks())

    def _add_ahead(self, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Add the rollouts that are generated ahead to the captured state."""
        assert self._state is not None
        ahead = {f"ahead.{name}": tensor for name, tensor in tensors.items()}
        self._state = TrainingState(self._state.numbers | {"ahead": numbers}, self._state.tensors | ahead)

    def _save_what_is_there(self, error: BaseException) -> None:
        """Save the captured state; only the model, if its weights are no longer those of the captured state."""
        if not self.schedule.save_model:
            self.tracker.log_info("this run saves nothing: train_evaluation.save_model is false")
            return

        n_completed = self._n_completed
        if not self._is_resumable:
            save_interrupted(self.tracker, self.save_model, n_completed, "iterations")
            return

        # A run that failed before it had sampled anything has nothing to resume. One that was interrupted is saved
        # also then: the same command continues it in the same folder.
        state = self._state
        assert state is not None
        is_in_update = self.run.algorithm.update_progress is not None
        has_state = n_completed > 0 or is_in_update or self.run.algorithm.has_sampled
        is_fresh = not has_state and isinstance(error, Exception)
        if not self.is_saved and not is_fresh:
            done = f"{n_completed} iterations"
            try_to_save(self.tracker, done, "state", lambda: self._write(state, INTERRUPTED))

    # --- restoring --------------------------------------------------------------------------------------------------

    def resume(self, checkpoint: Path) -> None:
        """Restore the state of a checkpoint, and remove what was written to the run's folder after it.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another run.
        """
        state = read_checkpoint(checkpoint)
        with restoring(checkpoint):
            self._restore(state)

        n_completed = self._n_completed
        where = f"in iteration {n_completed + 1}" if "update" in state.numbers else f"after {n_completed}"
        self.run.ranks.from_main(
            lambda: remove_later(self.tracker, checkpoint, state, where, keep=self.schedule.keep_last)
        )
        size_before = 1 + len(state.numbers.get("ranks", []))
        size_now = self.run.ranks.size
        if size_before != size_now:
            text = "results will differ from those of the uninterrupted run, since each samples its own texts"
            self.tracker.log_info(f"number of processes: {size_before} before, {size_now} now; {text}")
        self.is_saved = (self.tracker.checkpoint_base_path / ITERATION.format(n_completed) / MANIFEST).is_file()

    def _restore(self, state: TrainingState) -> None:
        """Restore a state into a run that was just assembled from the same config."""
        policy = self.run.policy
        numbers = state.numbers
        check_frozen(self._frozen, numbers["frozen"], self.run.config.tokenizer)
        load_weights(policy.training_state(), state.part("policy."))
        load_optimizer(policy.optimizer, numbers["optimizer"], state.part("optimizer."))
        if self.average is not None:
            self.average.restore(numbers.get("average"), state.part("average."))

        # Each process has generators and a reward of its own. One that the run did not have before takes those of the
        # main process.
        rank = self.run.ranks.rank
        saved_ranks = numbers.get("ranks", [])
        env_state = numbers["env"]
        random_numbers = numbers["random"]
        generators = state.part("random.")
        if 1 <= rank <= len(saved_ranks):
            env_state = env_state | {"reward": saved_ranks[rank - 1]["reward"]}
            random_numbers = saved_ranks[rank - 1]["random"]
            generators = state.part(f"rank{rank}.random.")
        for name, part in self.parts.items():
            part.load_state_dict(env_state if name == "env" else numbers[name])

        # The saved coefficient is what the controller has made of the old one. If the user has changed it on resuming,
        # the controller continues from the new one.
        coeff = self.run.config.alg.kl_div.coeff
        if at(numbers["config"], "alg.kl_div.coeff") != coeff:
            self.run.algorithm.kl_controller.coeff = coeff

        if "update" in numbers:
            load_unfinished_update(self.run.algorithm, numbers["update"], state.part("update."))
        if "ahead" in numbers:
            self.run.algorithm.collector.next_rollouts.load(numbers["ahead"], state.part("ahead."))
        load_random(random_numbers, generators)  # last: what is restored before may draw from the generators


def unfinished_update(algorithm: Any, progress: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what resuming an update needs in addition to the algorithm's state: numbers in JSON's types, and tensors.

    Args:
        algorithm: its buffer has the rollout of the update.
        progress: `update_progress.state_dict()` after the last finished step.
    """
    # Numbers of the rollout that are logged at the end of the iteration.
    recorded = []
    for key, value in algorithm.logger.name_to_value.items():
        recorded.append([key, value.item() if hasattr(value, "item") else value])
    buffer = algorithm.rollout_buffer
    numbers = {"progress": progress, "recorded": recorded, "prompt_side": buffer.episodes.prompt_side}

    # Scalars of the steps up to this progress, also if a further step has been recorded since.
    logged = algorithm.update_progress.logged(progress["n_steps"])
    tensors = {f"step.{name}": value for name, value in logged.items()}
    tensors |= {f"rollout.{name}": tensor for name, tensor in buffer.rollout().items()}
    return numbers, tensors


def load_unfinished_update(algorithm: Any, numbers: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Restore what `unfinished_update` returned; the algorithm's state is restored already."""
    # Names are `rollout.<field>` and `step.<number>.<name>`.
    by_kind: dict[str, dict[str, Tensor]] = {"step": {}, "rollout": {}}
    for name, tensor in tensors.items():
        kind, _, name_of_kind = name.partition(".")
        by_kind[kind][name_of_kind] = tensor.to(algorithm.device)
    algorithm.rollout_buffer.load_rollout(by_kind["rollout"], numbers["prompt_side"])

    algorithm.restore_update(numbers["progress"], by_kind["step"])
    for key, value in numbers["recorded"]:
        algorithm.logger.record(key, value)


def _why_unfit(state: Any) -> str | None:
    """Return why a component's state cannot be written to a checkpoint; None if it can."""
    if message := not_json(state):
        return f"it does not survive a round trip through JSON: {message}"
    if key := secret_in(state):
        return f"{key} contains a secret, which every checkpoint would contain; omit it and look it up on loading"
    return None
