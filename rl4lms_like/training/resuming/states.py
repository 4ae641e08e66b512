"""Parts of the state of a run, as tensors and numbers: weights, optimizer, random generators, digests of the rest.

RL runs (`resume_point`) and supervised runs use the same functions, the latter with the state of transformers' Trainer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl4lms_like.config.run_config import TokenizerConfig
from rl4lms_like.core.pictures import identity_of
from rl4lms_like.core.sample import Preference, Sample
from rl4lms_like.policies.sharding import like, whole
from rl4lms_like.system.errors import CheckpointError, RL4LMsLikeError

_FROZEN = "weights that are not trained (reference, frozen base)"
LEARNED_TURNS = "learned messages of the prompts"
_SAMPLES = "samples of the data pool"


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
def load_weights(weights: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights into those of the run.

    Raises:
        CheckpointError: names, shapes or types differ.
    """
    names = sorted(weights.keys() ^ saved.keys())
    if names:
        raise CheckpointError(f"its model has other weights: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")

    for name, tensor in weights.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise CheckpointError(f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the checkpoint")
        tensor.copy_(like(tensor, saved[name]))  # split weights take their own rows


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the moments, named `optimizer.<parameter>.<name>`, and the other numbers with the learning rates."""
    state = optimizer.state_dict()
    moments: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in _flat(entries).items():
            if isinstance(value, Tensor):
                moments[f"optimizer.{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    learning_rates = [float(group["lr"]) for group in state["param_groups"]]
    return moments, {"numbers": numbers, "lr": learning_rates}


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter, of which bitsandbytes hides its moments from FSDP in a mapping.

    Its `load_state_dict` accepts both forms.
    """
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, dict):
            flat |= value
        else:
            flat[name] = value
    return flat


def load_optimizer(optimizer: torch.optim.Optimizer, numbers: dict[str, Any], moments: dict[str, Tensor]) -> None:
    """Restore the state returned by `optimizer_state`, with names of moments without the prefix `optimizer.`."""
    weights: list[Tensor] = []
    for group in optimizer.param_groups:
        weights += group["params"]

    # By the number of the parameter, in the order of the groups, as torch's own state has it.
    entries: dict[int, dict[str, Any]] = {}
    for name, value in (moments | numbers["numbers"]).items():
        index, _, key = name.partition(".")
        if isinstance(value, Tensor):
            value = like(weights[int(index)], value)  # split weights have split moments
        entries.setdefault(int(index), {})[key] = value

    groups = optimizer.state_dict()["param_groups"]
    for group, learning_rate in zip(groups, numbers["lr"], strict=True):
        group["lr"] = float(learning_rate)
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def frozen_digests(
    module: torch.nn.Module, trained: Mapping[str, Tensor], samples: Mapping[str, Sequence[Sample]]
) -> dict[str, str]:
    """Return the SHA-256, by description, of what checkpoints omit and a resumed run must share.

    These are the samples, and the parameters of the module except for the `trained` ones, which are saved.
    """
    texts = hashlib.sha256()
    for split, split_samples in sorted(samples.items()):
        texts.update(f"{split} {len(split_samples)}".encode())
        for sample in split_samples:
            prompt = sample.rendered_prompt or sample.prompt_or_input_text
            # The pictures' numbers, too: a file with other pixels under the same name is another prompt.
            prompt = identity_of(prompt, sample.images)
            texts.update(repr((sample.id, prompt, list(sample.references))).encode())
            if isinstance(sample, Preference):
                texts.update(repr((sample.rejected, sample.margin)).encode())

    frozen = ((name, weight) for name, weight in module.named_parameters() if name not in trained)
    return {_FROZEN: weights_digest(frozen), _SAMPLES: texts.hexdigest()}


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        content: Any = whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def check_frozen(digests: Mapping[str, str], saved: Mapping[str, str], tokenizer: TokenizerConfig) -> None:
    """Raise a `CheckpointError` if two results of `frozen_digests` differ.

    Args:
        digests: of the resumed run.
        saved: of the checkpoint.
        tokenizer: block of the resumed run.
    """
    for description, digest in digests.items():
        if saved.get(description) == digest:
            continue

        # Runs of older versions have not stored the day that their template has written into the prompts.
        hint = ""
        if description == _SAMPLES and tokenizer.chat_template and tokenizer.template_date is None:
            option = "--set tokenizer.template_date=DAY, with the day on which the run started"
            hint = f"; if its chat template writes today's date, add {option}"
        raise CheckpointError(f"the {description} are not those of the run{hint}")


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of the global generators: tensors named `random.<generator>`, and numbers."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "random.torch": torch.get_rng_state(),
        # The same bytes as int32: torch supports few operations on uint32.
        "random.numpy": torch.from_numpy(np.asarray(keys, dtype=np.uint32).view(np.int32).copy()),
    }
    for device, module in _devices().items():
        for index, state in enumerate(_generator_states(module)):
            tensors[f"random.{device}.{index}"] = state

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

    # A run that is resumed on a machine with more devices leaves the generators of the new ones as they are.
    for device, module in _devices().items():
        for index in range(len(_generator_states(module))):
            if f"{device}.{index}" in tensors:
                module.set_rng_state(tensors[f"{device}.{index}"], index)


def _devices() -> dict[str, Any]:
    """Return the accelerators whose generators this process may have used, with torch's module for each."""
    devices: dict[str, Any] = {}
    for name in ("cuda", "xpu"):
        module = torch.get_device_module(name)
        if module.is_initialized():
            devices[name] = module
    if torch.backends.mps.is_available():
        devices["mps"] = torch.mps
    return devices


def _generator_states(module: Any) -> list[Tensor]:
    """Return the state of each of the module's generators; `torch.mps` has a single one."""
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]
