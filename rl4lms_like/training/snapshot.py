"""Everything that changes during a run, taken out of its objects and put back.

    weights        trained parameters, buffers, NLPO's mask model      policy.training_state()
    optimizer      moments, steps, learning rates
    algorithm      tokens, updates, KL coefficient, order of minibatches, seeds of the sampling
    environment    where the sequence of prompts stands
    reward         what a reward with `state_dict` says of itself
    random         the states of Python's, NumPy's and torch's global generators

What stays as it was loaded (the reference model, a frozen base) is not part of it; its digest is.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.errors import CheckpointError
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.checkpoints import TrainingState


def take(run: Run, frozen: str) -> TrainingState:
    """The state of a run between two iterations; `frozen` is its `frozen_digest`, which never changes."""
    moments, scalars = _optimizer_state(run.policy.optimizer)
    generators, random_numbers = _random_state()
    tensors = {f"policy.{name}": tensor for name, tensor in run.policy.training_state().items()}
    numbers = {
        "algorithm": run.algorithm.training_state(),
        "optimizer": scalars,
        "env": _env_state(run.env),
        "reward": _reward_state(run),
        "random": random_numbers,
        "frozen": frozen,
    }
    return TrainingState(numbers, tensors | moments | generators)


def put_back(run: Run, state: TrainingState, frozen: str) -> None:
    """Makes a run, just assembled from the same config, the one that `take` saw.

    Raises:
        CheckpointError: the state is of another model, or of another pool of prompts.
    """
    numbers, tensors = state.numbers, state.tensors
    try:
        if numbers["frozen"] != frozen:
            raise CheckpointError("the weights that are not trained (reference, frozen base) are not those of the run")
        _load_policy(run.policy, _part(tensors, "policy."))
        _load_optimizer(run.policy.optimizer, numbers["optimizer"], _part(tensors, "optimizer."))
        run.algorithm.load_training_state(numbers["algorithm"])
        # Stable-Baselines3 resets the environment at its first `learn`; that must not draw prompts later.
        run.algorithm._last_obs = run.env.reset()  # type: ignore[assignment]
        run.algorithm._last_episode_starts = np.ones((run.env.num_envs,), dtype=bool)
        _load_env(run.env, numbers["env"])
        if numbers["reward"] is not None:
            _reward(run).load_state_dict(numbers["reward"])
        _load_random(numbers["random"], _part(tensors, "random."))
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"it does not fit this run: {type(error).__name__}: {error}") from error


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# --- policy and optimizer -------------------------------------------------------------------------------------------


@torch.no_grad()
def _load_policy(policy: Any, saved: dict[str, Tensor]) -> None:
    own = policy.training_state()
    if own.keys() != saved.keys():
        names = sorted(own.keys() ^ saved.keys())
        raise CheckpointError(f"its model has other weights: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise CheckpointError(f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} there")
        tensor.copy_(saved[name])


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Moments by `optimizer.<parameter>.<name>`; numbers, and each group's learning rate."""
    state = optimizer.state_dict()
    moments, numbers = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                moments[f"optimizer.{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    return moments, {"numbers": numbers, "lr": [float(group["lr"]) for group in state["param_groups"]]}


def _load_optimizer(optimizer: torch.optim.Optimizer, numbers: dict[str, Any], moments: dict[str, Tensor]) -> None:
    fresh = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    for name, value in (moments | numbers["numbers"]).items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = value
    for group, learning_rate in zip(fresh["param_groups"], numbers["lr"], strict=True):
        group["lr"] = learning_rate
    optimizer.load_state_dict({"state": entries, "param_groups": fresh["param_groups"]})


def frozen_digest(policy: Any) -> str:
    """SHA-256 of the parameters that nothing changes, each once."""
    changing = {tensor.data_ptr() for tensor in policy.training_state().values()}
    digest = hashlib.sha256()
    for name, parameter in policy.named_parameters():
        if parameter.data_ptr() not in changing:
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# --- environment, reward, random numbers ----------------------------------------------------------------------------


def _env_state(env: VecEnv) -> Any:
    shared: Any = env  # a TextVecEnv has one sampler for all its environments
    return shared.state_dict() if hasattr(type(env), "state_dict") else env.env_method("state_dict")


def _load_env(env: VecEnv, state: Any) -> None:
    if hasattr(type(env), "load_state_dict"):
        env.load_state_dict(state)  # type: ignore[attr-defined]
        return
    if len(state) != env.num_envs:
        raise CheckpointError(f"it has {len(state)} environments")
    for index, each in enumerate(state):
        env.env_method("load_state_dict", each, indices=[index])


def _reward(run: Run) -> Any:
    return run.env.get_attr("reward_function", [0])[0]


def _reward_state(run: Run) -> Any:
    reward = _reward(run)
    return reward.state_dict() if hasattr(reward, "state_dict") else None


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "random.torch": torch.get_rng_state(),
        "random.numpy": torch.from_numpy(np.asarray(keys, dtype=np.uint32).view(np.int32).copy()),
    }
    tensors |= {f"random.cuda.{index}": state for index, state in _cuda_states()}
    numbers = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), int(position), int(has_gauss), float(cached)],
    }
    return tensors, numbers


def _load_random(numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
    kind, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().view(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    for index, _ in _cuda_states():
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)


def _cuda_states() -> Iterator[tuple[int, Tensor]]:
    if torch.cuda.is_initialized():
        yield from enumerate(torch.cuda.get_rng_state_all())
