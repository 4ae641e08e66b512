"""Capture and restore everything that changes during a run.

    weights        trained parameters, buffers, NLPO's mask model      policy.training_state()
    optimizer      moments, steps, learning rates
    algorithm      tokens, updates, KL coefficient, order of minibatches, seeds of the sampling
    environment    position in the sequence of prompts; state of a reward with `state_dict`
    metrics        state of metrics with `state_dict`
    random         the states of Python's, NumPy's and torch's global generators
    update         rollout and completed steps of an interrupted update

What does not change (the reference model, a frozen base model, the samples) is not saved; digests of it are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.errors import CheckpointError, MetricError, RewardError, RL4LMsLikeError
from rl4lms_like.core.remembering import load_state, not_json, state_of
from rl4lms_like.core.secrets import secret_in
from rl4lms_like.core.wording import shown
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.resuming.checkpoints import TrainingState
from rl4lms_like.training.resuming.states import (
    frozen_digests,
    load_optimizer,
    load_random,
    optimizer_state,
    random_state,
)


def light(run: Run) -> TrainingState:
    """Capture what rollouts and evaluations change: all but the weights. Later changes of the run do not affect it."""
    generators, random_numbers = random_state()
    numbers = {"algorithm": run.algorithm.training_state(), **remembered(run), "random": random_numbers}
    return TrainingState(copy.deepcopy(numbers), generators)


def in_update(run: Run, since: TrainingState) -> TrainingState:
    """Capture the state between two steps of an update, which change neither environment nor metrics."""
    generators, random_numbers = random_state()
    update: Any = run.algorithm.update
    changed = {"algorithm": run.algorithm.training_state(), "random": random_numbers, "update": update.state_dict()}
    return TrainingState(since.numbers | changed, generators)


def take(run: Run, since: TrainingState, frozen: Mapping[str, str]) -> TrainingState:
    """Capture the complete state from which a run resumes.

    Args:
        run: run whose weights are those at the time of `since`.
        since: result of `light` or `in_update`.
        frozen: result of `digests` at the start of the run.
    """
    moments, scalars = optimizer_state(run.policy.optimizer)
    tensors = {f"policy.{name}": tensor for name, tensor in run.policy.training_state().items()}
    numbers = since.numbers | {"optimizer": scalars, "frozen": dict(frozen)}
    if "update" in numbers:
        numbers["update"], rollout = run.algorithm.update_state(numbers["update"])
        tensors |= {f"update.{name}": tensor for name, tensor in rollout.items()}
    return TrainingState(numbers, tensors | moments | since.tensors)


def remembered(run: Run) -> dict[str, Any]:
    """Return the states of environment, reward and metrics.

    Raises:
        RewardError: the reward's state does not survive a round trip through JSON, or contains a secret.
        MetricError: the same holds for the state of a metric.
    """
    shared: Any = run.env  # a TextVecEnv has one sampler for all its environments
    envs = shared.state_dict() if hasattr(type(run.env), "state_dict") else run.env.env_method("state_dict")
    for env in [envs] if isinstance(envs, dict) else envs:
        if said := _unfit(env["reward"]):
            raise RewardError(f"the result of the reward's state_dict() cannot be saved: {said}")
    metrics = [state_of(metric) for metric in run.metrics]
    for metric, state in zip(run.metrics, metrics, strict=True):
        if said := _unfit(state):
            raise MetricError(f"the result of {type(metric).__name__}.state_dict() cannot be saved: {said}")
    return {"env": envs, "metrics": metrics}


def _unfit(state: Any) -> str | None:
    """Return why a component's state cannot be written to a checkpoint; None if it can."""
    if said := not_json(state):
        return f"it does not survive a round trip through JSON: {said}"
    if place := secret_in(state):
        return f"{place} contains a secret, which every checkpoint would contain; omit it and look it up on loading"
    return None


def put_back(run: Run, state: TrainingState, frozen: Mapping[str, str]) -> None:
    """Restore the state captured by `take` into a run that was just assembled from the same config.

    Raises:
        CheckpointError: the state belongs to another model or another data pool.
    """
    try:
        _put_back(run, state.numbers, state.tensors, frozen)
    except RL4LMsLikeError:
        raise
    except Exception as error:  # loading the state of another model can raise any exception
        raise CheckpointError(f"it does not match this run: {type(error).__name__}: {error}") from error


def _put_back(run: Run, numbers: dict[str, Any], tensors: dict[str, Tensor], frozen: Mapping[str, str]) -> None:
    for what, digest in frozen.items():
        if numbers["frozen"][what] != digest:
            raise CheckpointError(f"the {what} are not those of the run")
    if wrong := next(_unlike(run.algorithm.training_state(), numbers["algorithm"], "algorithm"), None):
        raise CheckpointError(f"it does not match this run: {wrong}")
    _check_env(remembered(run)["env"], numbers["env"])
    _load_policy(run.policy, _part(tensors, "policy."))
    load_optimizer(run.policy.optimizer, numbers["optimizer"], _part(tensors, "optimizer."))
    run.algorithm.load_training_state(numbers["algorithm"])
    if run.algorithm.num_timesteps:  # before that, environments may still expect their seed at the first reset
        # Stable-Baselines3 resets the environment at its first `learn`; that must not draw prompts later.
        run.algorithm._last_obs = run.env.reset()  # type: ignore[assignment]
        run.algorithm._last_episode_starts = np.ones((run.env.num_envs,), dtype=bool)
        _load_env(run.env, numbers["env"])
    for metric, own in zip(run.metrics, numbers["metrics"], strict=True):
        load_state(metric, own)
    if "update" in numbers:
        run.algorithm.load_update_state(numbers["update"], _part(tensors, "update."))
    load_random(numbers["random"], _part(tensors, "random."))


def _unlike(own: Any, saved: Any, path: str) -> Iterator[str]:
    """Yield the places where a saved state lacks keys of the run's own state or has values of other types."""
    if isinstance(own, dict):
        if not isinstance(saved, dict) or not own.keys() <= saved.keys():
            yield f"{path} lacks keys"
        else:
            for key, value in own.items():
                yield from _unlike(value, saved[key], f"{path}.{key}")
    elif type(own) is int:
        if type(saved) is not int or saved < min(own, 0):  # counters, or words of a generator's state
            yield f"{path} is {shown(saved)}, not a count"
    elif isinstance(own, float):
        if type(saved) not in (int, float) or not math.isfinite(saved):
            yield f"{path} is {shown(saved)}, not a number"
    elif own is not None and type(saved) is not type(own):
        yield f"{path} is {shown(saved)}"


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# --- policy -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _load_policy(policy: Any, saved: dict[str, Tensor]) -> None:
    own = policy.training_state()
    if own.keys() != saved.keys():
        names = sorted(own.keys() ^ saved.keys())
        raise CheckpointError(f"its model has other weights: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise CheckpointError(f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint")
        tensor.copy_(saved[name])


def digests(run: Run) -> dict[str, str]:
    """Return SHA-256 digests of the weights and samples that do not change during the run."""
    changing = {tensor.data_ptr() for tensor in run.policy.training_state().values()}
    return frozen_digests(run.policy, changing, run.samples)


# --- environment, reward ----------------------------------------------------------------------------------------------


def _check_env(own: Any, saved: Any) -> None:
    pairs = [(own, saved)] if isinstance(own, dict) else list(zip(own, saved, strict=True))
    for mine, theirs in pairs:
        if wrong := next(_unlike(mine["sampler"], theirs["sampler"], "env.sampler"), None):
            raise CheckpointError(f"it does not match this run: {wrong}")


def _load_env(env: VecEnv, state: Any) -> None:
    if hasattr(type(env), "load_state_dict"):
        env.load_state_dict(state)  # type: ignore[attr-defined]
        return
    if len(state) != env.num_envs:
        raise CheckpointError(f"it has {len(state)} environments")
    for index, each in enumerate(state):
        env.env_method("load_state_dict", each, indices=[index])
