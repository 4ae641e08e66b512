"""State from which a run can be resumed: its parts as tensors and numbers, captured and restored.

completed iterations ─ mark ─┐
steps of an update ─ mark_in_update ─┴─ the run ends ─ rescue ─> checkpoints/interrupted_00003
                                        save_every ── write ──> checkpoints/iteration_00003

    weights        trained parameters, buffers, NLPO's mask model      policy.training_state()
    optimizer      moments, named `optimizer.<parameter>.<name>`; steps, learning rates
    algorithm      tokens, updates, KL coefficient, order of minibatches, seeds of the sampling
    environment    position in the sequence of prompts; state of a reward with `state_dict`
    metrics        state of metrics with `state_dict`
    random         the states of Python's, NumPy's and torch's global generators
    update         rollout and completed steps of an interrupted update
    ahead          the next rollout's episodes, if they are generated during the update before it

What does not change (the reference model, a frozen base model, the samples) is not saved; digests of it are. Supervised
runs use the same functions, with the state of transformers' Trainer.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rl4lms_like.core.component_state import load_state, not_json, state_of
from rl4lms_like.core.disk import saving, with_filename
from rl4lms_like.core.errors import CheckpointError, MetricError, RewardError, RL4LMsLikeError
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.core.secrets import secret_in
from rl4lms_like.policies.sharding import like, whole
from rl4lms_like.tracking.run_folder import to_json
from rl4lms_like.training.resuming.checkpoints import (
    INTERRUPTED,
    ITERATION,
    MANIFEST,
    TrainingState,
    read_checkpoint,
    write_checkpoint,
)
from rl4lms_like.training.resuming.resume import log_resume_hint, remove_later, save_interrupted, try_to_save

if TYPE_CHECKING:
    from rl4lms_like.rollouts.ahead import AheadBatches
    from rl4lms_like.training.trainer import OnPolicyTrainer

logger = logging.getLogger(__name__)

ENGINE_TIMEOUT_S = 20.0
"""Seconds that an interrupted run waits for the responses that an engine generates ahead; torchrun kills after 30."""


class ResumePoint:
    """State that a run resumes from, after a whole number of iterations or of steps of an update.

    `is_saved` tells if a checkpoint of it exists.

    Raises:
        RewardError: the reward's state does not survive a round trip through JSON, or contains a secret.
        MetricError: the same holds for the state of a metric.
    """

    def __init__(self, trainer: OnPolicyTrainer) -> None:
        self.trainer, self.run, self.tracker = trainer, trainer.run, trainer.tracker
        self.is_saved = False
        self._state: TrainingState | None = None
        self._ahead: AheadBatches | None = None
        self._components()  # reports unsavable state now, not at the first checkpoint
        if trainer.schedule.save_model:
            _ = self._frozen  # computed before a reward or a metric may change the samples

    @cached_property
    def _frozen(self) -> dict[str, str]:
        return frozen_digests(self.run.policy, self.run.policy.training_state(), self.run.samples)

    # --- capturing --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Discard the state: the run cannot be resumed in the middle of what follows."""
        self._state = None

    def mark(self, *, is_saved: bool = False) -> None:
        """Capture all but the weights; if the run ends before the next mark, it resumes from here."""
        trainer = self.trainer
        generators, random_numbers = random_state()
        numbers = {
            "algorithm": self.run.algorithm.training_state(),
            **self._components(),
            "random": random_numbers,
            "trainer": {"iteration": trainer.current_iter, "evaluated": sorted(trainer.evaluated)},
            "watchers": {name: callback.state_dict() for name, callback in trainer.callbacks.items()},
            "files": self.tracker.file_sizes(on_disk=False),
        } | self._of_other_ranks(generators, random_numbers)
        self._state, self.is_saved = TrainingState(copy.deepcopy(numbers), generators), is_saved
        self._ahead = self.run.algorithm.collector.next_rollout.for_checkpoint

    def mark_in_update(self) -> None:
        """Capture the state between two steps of an update; stop the run here if an interruption was requested.

        An update changes neither the environment nor the metrics.
        """
        if self._state is None or "update" not in self._state.numbers:
            self.mark()
        assert self._state is not None
        generators, random_numbers = random_state()
        update: Any = self.run.algorithm.update_progress
        changed = {
            "algorithm": self.run.algorithm.training_state(),
            "random": random_numbers,
            "update": update.state_dict(),
            "trainer": self._state.numbers["trainer"] | {"seconds": self.trainer.seconds},
        } | self._of_other_ranks(generators, random_numbers)
        self._state, self.is_saved = TrainingState(self._state.numbers | changed, generators), False
        self.trainer.interruption.check()

    def _of_other_ranks(self, generators: dict[str, Tensor], numbers: dict[str, Any]) -> dict[str, Any]:
        """Return what may differ between processes: `ranks`, from rank 1 on; add their tensors to `generators`."""
        if self.run.ranks.size == 1:
            return {}
        env: Any = self.run.env
        _, *others = self.run.ranks.gather((dict(generators), numbers, env.state_dict()["reward"]))
        for rank, (tensors, _, _) in enumerate(others, 1):
            generators |= {f"rank{rank}.{name}": tensor.cpu() for name, tensor in tensors.items()}
        return {"ranks": [{"random": found, "reward": reward} for _, found, reward in others]}

    def _components(self) -> dict[str, Any]:
        """Return the states of environment, reward and metrics."""
        shared: Any = self.run.env  # a TextVecEnv has one sampler for all its environments
        envs = shared.state_dict() if hasattr(type(shared), "state_dict") else shared.env_method("state_dict")
        for env in [envs] if isinstance(envs, dict) else envs:
            if message := _why_unfit(env["reward"]):
                raise RewardError(f"the result of the reward's state_dict() cannot be saved: {message}")
        metrics = [state_of(metric) for metric in self.run.metrics]
        for metric, state in zip(self.run.metrics, metrics, strict=True):
            if message := _why_unfit(state):
                raise MetricError(f"the result of {type(metric).__name__}.state_dict() cannot be saved: {message}")
        return {"env": envs, "metrics": metrics}

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self) -> Path:
        """Write the checkpoint of a completed iteration.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        self.mark()
        assert self._state is not None
        with self.run.policy.whole_in_main(with_optimizer=True):
            if self.run.ranks.is_main:
                self._write(self._state, ITERATION)
        self.is_saved = True
        return self.tracker.checkpoint_base_path / ITERATION.format(self.trainer.current_iter)

    def _write(self, captured: TrainingState, name: str) -> Path:
        """Write a captured state together with the weights, which must be those at the time of its capture."""
        run, iteration = self.run, self.trainer.current_iter
        moments, scalars = optimizer_state(run.policy.optimizer)
        tensors = {f"policy.{name}": tensor for name, tensor in run.policy.training_state().items()}
        config = to_json(self.tracker.run_config)
        numbers = captured.numbers | {"optimizer": scalars, "frozen": self._frozen, "config": config}
        if "update" in numbers:
            numbers["update"], rollout = run.algorithm.update_state(numbers["update"])
            tensors |= {f"update.{name}": tensor for name, tensor in rollout.items()}
        if self._ahead is not None:
            timeout = ENGINE_TIMEOUT_S if name == INTERRUPTED else None
            numbers["ahead"], episodes = self._ahead.state(timeout)
            tensors |= {f"ahead.{name}": tensor for name, tensor in episodes.items()}
        state = TrainingState(numbers, tensors | moments | captured.tensors)
        keep = self.trainer.schedule.keep_last
        with saving(f"the checkpoint of iteration {iteration}"):
            base = self.tracker.checkpoint_base_path
            with with_filename(base / name.format(iteration)):
                self.tracker.file_sizes()  # flushes the files to disk
                return write_checkpoint(base, iteration, state, self.trainer.save, name=name, keep=keep)

    def rescue(self, error: BaseException) -> None:
        """Save the state to resume from when a run ends early, unless nothing would be lost.

        Split weights can be saved only if all processes end together, that is, after an interruption.
        """
        policy, is_together = self.run.policy, isinstance(error, KeyboardInterrupt)
        if policy.is_sharded and not (is_together and self.trainer.interruption.requests < 2):
            if self.run.ranks.is_main:
                self.tracker.log_info(
                    "progress since the last checkpoint is lost: not all processes have ended together"
                )
                log_resume_hint(self.tracker, error)
            return
        with policy.whole_in_main(with_optimizer=True):
            if self.run.ranks.is_main:
                self._rescue(error)

    def _rescue(self, error: BaseException) -> None:
        trainer, update, state = self.trainer, self.run.algorithm.update_progress, self._state
        has_state = trainer.current_iter > 0 or update is not None or self.run.algorithm.has_sampled
        is_fresh = not has_state and isinstance(error, Exception)
        try:
            if trainer.interruption.requests > 1:
                return
            if not trainer.schedule.save_model:
                self.tracker.log_info("this run saves nothing: train_evaluation.save_model is false")
            elif state is None or (update is not None and not ("update" in state.numbers and update.can_go_on)):
                save_interrupted(self.tracker, trainer.save, trainer.current_iter, "iterations")
            elif not self.is_saved and not is_fresh:
                done = f"{trainer.current_iter} iterations"
                try_to_save(self.tracker, done, "state", lambda: self._write(state, INTERRUPTED))
        finally:
            if trainer.interruption.requests > 1:
                self.tracker.log_info("stopped immediately: progress since the last checkpoint is lost")
            log_resume_hint(self.tracker, error)

    # --- restoring --------------------------------------------------------------------------------------------------

    def resume(self, checkpoint: Path) -> None:
        """Restore the state of a checkpoint, and remove what was written to the run's folder after it.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another run.
        """
        trainer, state = self.trainer, read_checkpoint(checkpoint)
        with restoring(checkpoint):
            self._restore(state)
            numbers = state.numbers["trainer"]
            trainer.current_iter, trainer.seconds_before = numbers["iteration"], numbers.get("seconds", 0.0)
            trainer.evaluated = {(epoch, split) for epoch, split in numbers["evaluated"]}
            for name, callback in trainer.callbacks.items():
                callback.load_state_dict(state.numbers["watchers"][name])
        done = trainer.current_iter
        where = f"in iteration {done + 1}" if "update" in state.numbers else f"after {done}"
        self.run.ranks.from_main(
            lambda: remove_later(self.tracker, checkpoint, state, where, keep=trainer.schedule.keep_last)
        )
        before, now = 1 + len(state.numbers.get("ranks", [])), self.run.ranks.size
        if before != now:
            text = "results will differ from those of the uninterrupted run, since each samples its own texts"
            self.tracker.log_info(f"number of processes: {before} before, {now} now; {text}")
        self.is_saved = (self.tracker.checkpoint_base_path / ITERATION.format(done) / MANIFEST).is_file()

    def _restore(self, state: TrainingState) -> None:
        """Restore a state into a run that was just assembled from the same config."""
        run, numbers = self.run, state.numbers
        check_frozen(self._frozen, numbers["frozen"])
        load_weights(run.policy.training_state(), state.part("policy."))
        load_optimizer(run.policy.optimizer, numbers["optimizer"], state.part("optimizer."))
        run.algorithm.load_training_state(numbers["algorithm"])
        if run.algorithm.has_sampled:  # before that, environments may still expect their seed at the first reset
            run.env.reset()  # uses up the seed, which must not replace the state that is loaded
            saved = numbers["env"]
            if isinstance(saved, dict):
                own_reward = self._own(numbers).get("reward", saved["reward"])
                run.env.load_state_dict(saved | {"reward": own_reward})  # type: ignore[attr-defined]
            else:
                for index, each in enumerate(saved):
                    run.env.env_method("load_state_dict", each, indices=[index])
        for metric, metric_state in zip(run.metrics, numbers["metrics"], strict=True):
            load_state(metric, metric_state)
        if "update" in numbers:
            run.algorithm.load_update_state(numbers["update"], state.part("update."))
        if "ahead" in numbers:
            run.algorithm.collector.next_rollout.load(numbers["ahead"], state.part("ahead."))
        load_random(*self._own_random(state))

    def _own(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a state that is only this process's; empty in the main process, and in an added one."""
        others = numbers.get("ranks", [])
        return dict(others[self.run.ranks.rank - 1]) if 1 <= self.run.ranks.rank <= len(others) else {}

    def _own_random(self, state: TrainingState) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the states of this process's random generators, as `load_random` needs them."""
        own = self._own(state.numbers)
        prefix = f"rank{self.run.ranks.rank}.random." if own else "random."
        return own.get("random", state.numbers["random"]), state.part(prefix)


def _why_unfit(state: Any) -> str | None:
    """Return why a component's state cannot be written to a checkpoint; None if it can."""
    if message := not_json(state):
        return f"it does not survive a round trip through JSON: {message}"
    if place := secret_in(state):
        return f"{place} contains a secret, which every checkpoint would contain; omit it and look it up on loading"
    return None


# --- parts of the state -----------------------------------------------------------------------------------------------

_FROZEN = "weights that are not trained (reference, frozen base)"


@contextmanager
def restoring(checkpoint: Path) -> Iterator[None]:
    """Convert errors of the block, which restores the state of a checkpoint, into errors that name the checkpoint.

    Raises:
        CheckpointError: the state belongs to another run.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error
    except RL4LMsLikeError:
        raise
    except Exception as error:  # loading the state of another model can raise any exception
        raise CheckpointError(f"{checkpoint}: does not match this run: {type(error).__name__}: {error}") from error


@torch.no_grad()
def load_weights(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights into those of the run.

    Raises:
        CheckpointError: names, shapes or types differ.
    """
    if names := sorted(own.keys() ^ saved.keys()):
        raise CheckpointError(f"its model has other weights: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise CheckpointError(f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint")
        tensor.copy_(like(tensor, saved[name]))


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the moments, named `optimizer.<parameter>.<name>`, and the other numbers with the learning rates."""
    state = optimizer.state_dict()
    found = {f"{index}.{name}": value for index, each in state["state"].items() for name, value in each.items()}
    moments = {f"optimizer.{name}": value for name, value in found.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in found.items() if not isinstance(value, Tensor)}
    rates = [float(group["lr"]) for group in state["param_groups"]]
    return moments, {"numbers": numbers, "lr": rates}


def load_optimizer(optimizer: torch.optim.Optimizer, numbers: dict[str, Any], moments: dict[str, Tensor]) -> None:
    """Restore the state returned by `optimizer_state`, with names of moments without the prefix `optimizer.`."""
    fresh = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for name, value in (moments | numbers["numbers"]).items():
        index, _, key = name.partition(".")
        is_moment = isinstance(value, Tensor)
        entries.setdefault(int(index), {})[key] = like(weights[int(index)], value) if is_moment else value
    for group, learning_rate in zip(fresh["param_groups"], numbers["lr"], strict=True):
        group["lr"] = float(learning_rate)
    optimizer.load_state_dict({"state": entries, "param_groups": fresh["param_groups"]})


def frozen_digests(
    module: torch.nn.Module, trained: Mapping[str, Tensor], samples: Mapping[str, Sequence[Sample]]
) -> dict[str, str]:
    """Return the SHA-256, by description, of what checkpoints omit and a resumed run must share.

    These are the samples, and the parameters of the module except for the `trained` ones, which are saved.
    """
    texts = hashlib.sha256()
    for split, of_split in sorted(samples.items()):
        texts.update(f"{split} {len(of_split)}".encode())
        for sample in of_split:
            prompt = sample.rendered_prompt or sample.prompt_or_input_text
            texts.update(repr((sample.id, prompt, list(sample.references))).encode())
            if isinstance(sample, Preference):
                texts.update(repr((sample.rejected, sample.margin)).encode())
    frozen = ((name, each) for name, each in module.named_parameters() if name not in trained)
    return {_FROZEN: weights_digest(frozen), "samples of the data pool": texts.hexdigest()}


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        content: Any = whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def check_frozen(own: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raise a `CheckpointError` if two results of `frozen_digests` differ."""
    for what, digest in own.items():
        if saved[what] != digest:
            raise CheckpointError(f"the {what} are not those of the run")


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of the global generators: tensors named `random.<generator>`, and numbers."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "random.torch": torch.get_rng_state(),
        "random.numpy": torch.from_numpy(np.asarray(keys, dtype=np.uint32).view(np.int32).copy()),
    }
    for kind_of_device, module in _devices().items():
        for index, state in enumerate(_states_of(module)):
            tensors[f"random.{kind_of_device}.{index}"] = state
    numbers = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), int(position), int(has_gauss), float(cached)],
    }
    return tensors, numbers


def load_random(numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore the state returned by `random_state`, with tensor names without the prefix `random.`."""
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    kind, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().view(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for kind_of_device, module in _devices().items():
        for index in range(len(_states_of(module))):
            if f"{kind_of_device}.{index}" in tensors:
                module.set_rng_state(tensors[f"{kind_of_device}.{index}"], index)


def _devices() -> dict[str, Any]:
    """Return the accelerators whose generators this process may have used, with torch's module for each."""
    found: dict[str, Any] = {}
    for kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        if module.is_initialized():
            found[kind] = module
    return found | ({"mps": torch.mps} if torch.backends.mps.is_available() else {})


def _states_of(module: Any) -> list[Tensor]:
    """Return the state of each of the module's generators; `torch.mps` has a single one."""
    return list(module.get_rng_state_all()) if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
