"""States of models, optimizers and random generators as tensors and numbers; digests of what does not change in a run.

    weights       trained parameters and buffers; their names are prefixed by the caller
    optimizer     moments, named `optimizer.<parameter>.<name>`; steps, learning rates
    random        the states of Python's, NumPy's and torch's global generators
    frozen        SHA-256 of weights that are not trained, and of the samples

Checkpoints of both RL and supervised runs use these functions.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl4lms_like.core.errors import CheckpointError, RL4LMsLikeError
from rl4lms_like.core.sample import Sample

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
        tensor.copy_(saved[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the moments, named `optimizer.<parameter>.<name>`, and the other numbers with the learning rates."""
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
    """Return dtype and shape of each moment. Optimizers do not check them and accept missing moments."""
    return {
        name.removeprefix("optimizer."): f"{moment.dtype} {tuple(moment.shape)}" for name, moment in moments.items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, numbers: dict[str, Any], moments: dict[str, Tensor], *, factored: bool = False
) -> None:
    """Restore the state returned by `optimizer_state`.

    Args:
        optimizer: optimizer of the same parameters.
        numbers: the part of the state that is not tensors.
        moments: `<parameter>.<name>` -> tensor.
        factored: whether moments may have other shapes than their parameters, as in Adafactor.

    Raises:
        CheckpointError: the moments belong to other parameters.
    """
    fresh = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    if _kinds(moments) != numbers["moments"]:
        raise CheckpointError("the optimizer's moments differ from those that were saved")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, value in (moments | numbers["numbers"]).items():
        index, _, key = name.partition(".")
        is_whole = isinstance(value, Tensor) and value.numel() > 1 and not factored
        if is_whole and value.shape != parameters[int(index)].shape:
            raise CheckpointError(f"the optimizer's {name} has the shape {tuple(value.shape)} in the checkpoint")
        entries.setdefault(int(index), {})[key] = value
    for group, learning_rate in zip(fresh["param_groups"], numbers["lr"], strict=True):
        group["lr"] = float(learning_rate)
    optimizer.load_state_dict({"state": entries, "param_groups": fresh["param_groups"]})


def frozen_digests(
    module: torch.nn.Module, trained: Mapping[str, Tensor], samples: Mapping[str, Sequence[Sample]]
) -> dict[str, str]:
    """Return digests of what is not saved in checkpoints and must be the same when a run is resumed.

    Args:
        module: module whose parameters are read, each once.
        trained: tensors of the module that are trained, and saved.
        samples: split -> samples.

    Returns:
        Description -> SHA-256.
    """
    changing = {tensor.data_ptr() for tensor in trained.values()}
    texts = hashlib.sha256()
    for split, of_split in sorted(samples.items()):
        texts.update(f"{split} {len(of_split)}".encode())
        for sample in of_split:
            texts.update(repr((sample.id, sample.prompt_or_input_text, list(sample.references))).encode())
    weights = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if parameter.data_ptr() not in changing:
            weights.update(name.encode())
            content: Any = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            weights.update(content)
    return {_FROZEN: weights.hexdigest(), "samples of the data pool": texts.hexdigest()}


def check_frozen(own: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Compare results of `frozen_digests`.

    Raises:
        CheckpointError: they differ.
    """
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
