"""Everything that changes during a run, taken out of its objects and put back.

    weights        trained parameters, buffers, NLPO's mask model      policy.training_state()
    optimizer      moments, steps, learning rates
    algorithm      tokens, updates, KL coefficient, order of minibatches, seeds of the sampling
    environment    where the sequence of prompts stands; what a reward with `state_dict` remembers
    metrics        what metrics with `state_dict` remember
    random         the states of Python's, NumPy's and torch's global generators

What stays as it was loaded (the reference model, a frozen base, the samples) is not part of it; digests of it are.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.errors import CheckpointError, MetricError, RewardError, RL4LMsLikeError
from rl4lms_like.core.remembering import load_state, not_json, state_of
from rl4lms_like.core.wording import shown
from rl4lms_like.training.assemble import Run
from rl4lms_like.training.checkpoints import TrainingState

_FROZEN = "weights that are not trained (reference, frozen base)"


def take(run: Run, frozen: Mapping[str, str]) -> TrainingState:
    """The state of a run between two iterations; `frozen` is what `digests` said of it at its start."""
    moments, scalars = _optimizer_state(run.policy.optimizer)
    generators, random_numbers = _random_state()
    tensors = {f"policy.{name}": tensor for name, tensor in run.policy.training_state().items()}
    numbers = {
        "algorithm": run.algorithm.training_state(),
        "optimizer": scalars,
        **remembered(run),
        "random": random_numbers,
        "frozen": dict(frozen),
    }
    return TrainingState(numbers, tensors | moments | generators)


def remembered(run: Run) -> dict[str, Any]:
    """What environment, reward and metrics say of themselves.

    Raises:
        RewardError: the reward says what JSON would not give back.
        MetricError: a metric does.
    """
    shared: Any = run.env  # a TextVecEnv has one sampler for all its environments
    envs = shared.state_dict() if hasattr(type(run.env), "state_dict") else run.env.env_method("state_dict")
    for env in [envs] if isinstance(envs, dict) else envs:
        if said := not_json(env["reward"]):
            raise RewardError(f"what the reward's state_dict() returns cannot be saved as JSON: {said}")
    metrics = [state_of(metric) for metric in run.metrics]
    for metric, state in zip(run.metrics, metrics, strict=True):
        if said := not_json(state):
            raise MetricError(f"what {type(metric).__name__}.state_dict() returns cannot be saved as JSON: {said}")
    return {"env": envs, "metrics": metrics}


def put_back(run: Run, state: TrainingState, frozen: Mapping[str, str]) -> None:
    """Makes a run, just assembled from the same config, the one that `take` saw.

    Raises:
        CheckpointError: the state is of another model, or of another pool of prompts.
    """
    try:
        _put_back(run, state.numbers, state.tensors, frozen)
    except RL4LMsLikeError:
        raise
    except Exception as error:  # whatever a state of something else does to those who load it
        raise CheckpointError(f"it does not fit this run: {type(error).__name__}: {error}") from error


def _put_back(run: Run, numbers: dict[str, Any], tensors: dict[str, Tensor], frozen: Mapping[str, str]) -> None:
    for what, digest in frozen.items():
        if numbers["frozen"][what] != digest:
            raise CheckpointError(f"the {what} are not those of the run")
    if wrong := next(_unlike(run.algorithm.training_state(), numbers["algorithm"], "algorithm"), None):
        raise CheckpointError(f"it does not fit this run: {wrong}")
    _check_env(remembered(run)["env"], numbers["env"])
    _load_policy(run.policy, _part(tensors, "policy."))
    _load_optimizer(run.policy.optimizer, numbers["optimizer"], _part(tensors, "optimizer."))
    run.algorithm.load_training_state(numbers["algorithm"])
    # Stable-Baselines3 resets the environment at its first `learn`; that must not draw prompts later.
    run.algorithm._last_obs = run.env.reset()  # type: ignore[assignment]
    run.algorithm._last_episode_starts = np.ones((run.env.num_envs,), dtype=bool)
    _load_env(run.env, numbers["env"])
    for metric, own in zip(run.metrics, numbers["metrics"], strict=True):
        load_state(metric, own)
    _load_random(numbers["random"], _part(tensors, "random."))


def _unlike(own: Any, saved: Any, path: str) -> Iterator[str]:
    """Where a saved state has not the keys and types of a run's own."""
    if isinstance(own, dict):
        if not isinstance(saved, dict) or not own.keys() <= saved.keys():
            yield f"{path} lacks keys"
        else:
            for key, value in own.items():
                yield from _unlike(value, saved[key], f"{path}.{key}")
    elif type(own) is int:
        if type(saved) is not int or saved < min(own, 0):  # they count, or are a generator's words
            yield f"{path} is {shown(saved)}, not a count"
    elif isinstance(own, float):
        if type(saved) not in (int, float) or not math.isfinite(saved):
            yield f"{path} is {shown(saved)}, not a number"
    elif own is not None and type(saved) is not type(own):
        yield f"{path} is {shown(saved)}"


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
    rates = [float(group["lr"]) for group in state["param_groups"]]
    return moments, {"numbers": numbers, "lr": rates, "moments": _kinds(moments)}


def _kinds(moments: dict[str, Tensor]) -> dict[str, str]:
    """Type and shape of each; an optimizer would take any, and start without those that are missing."""
    return {
        name.removeprefix("optimizer."): f"{moment.dtype} {tuple(moment.shape)}" for name, moment in moments.items()
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, numbers: dict[str, Any], moments: dict[str, Tensor]) -> None:
    fresh = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    if _kinds(moments) != numbers["moments"]:
        raise CheckpointError("the optimizer's moments are not those that were saved")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in (moments | numbers["numbers"]).items():
        index, _, key = name.partition(".")
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameters[int(index)].shape:
            raise CheckpointError(f"the optimizer's {name} is {tuple(value.shape)} there")
        entries.setdefault(int(index), {})[key] = value
    for group, learning_rate in zip(fresh["param_groups"], numbers["lr"], strict=True):
        group["lr"] = float(learning_rate)
    optimizer.load_state_dict({"state": entries, "param_groups": fresh["param_groups"]})


def digests(run: Run) -> dict[str, str]:
    """SHA-256 of what nothing changes."""
    texts = hashlib.sha256()
    for split, samples in sorted(run.samples.items()):
        texts.update(f"{split} {len(samples)}".encode())
        for sample in samples:
            texts.update(repr((sample.id, sample.prompt_or_input_text, list(sample.references))).encode())
    return {_FROZEN: _frozen_digest(run.policy), "samples of the data pool": texts.hexdigest()}


def _frozen_digest(policy: Any) -> str:
    """Of the parameters, each once."""
    changing = {tensor.data_ptr() for tensor in policy.training_state().values()}
    digest = hashlib.sha256()
    for name, parameter in policy.named_parameters():
        if parameter.data_ptr() not in changing:
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# --- environment, reward, random numbers ----------------------------------------------------------------------------


def _check_env(own: Any, saved: Any) -> None:
    pairs = [(own, saved)] if isinstance(own, dict) else list(zip(own, saved, strict=True))
    for mine, theirs in pairs:
        if wrong := next(_unlike(mine["sampler"], theirs["sampler"], "env.sampler"), None):
            raise CheckpointError(f"it does not fit this run: {wrong}")


def _load_env(env: VecEnv, state: Any) -> None:
    if hasattr(type(env), "load_state_dict"):
        env.load_state_dict(state)  # type: ignore[attr-defined]
        return
    if len(state) != env.num_envs:
        raise CheckpointError(f"it has {len(state)} environments")
    for index, each in enumerate(state):
        env.env_method("load_state_dict", each, indices=[index])


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
