"""Optimizers of a policy: groups of its parameters, and AdamW with moments in float32 or in 8 bits.

adamw         torch's AdamW, fused: 8 bytes of moments for each trained parameter
adamw_8bit    torchao's AdamW: 2.03 bytes (Dettmers et al., arXiv 2110.02861)

Between updates, moments can be in main memory (`offload: moments`):

    end of an update ─ offload_moments ─ evaluation, rollout ─ first optimizer step: return_moments
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl4lms_like.policies.arguments import ADAMW, ADAMW_8BIT, PolicyArguments
from rl4lms_like.policies.sharding import rows_of_blocks
from rl4lms_like.system.errors import require_extra


def parameter_groups(
    actor: Iterable[nn.Parameter], critic: Iterable[nn.Parameter], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return optimizer groups with the extra key `role` (`actor` or `critic`), so that each can have a learning rate.

    Biases and normalisation weights (everything with fewer than two dimensions) have no weight decay. A parameter that
    both use belongs to the actor.
    """
    groups: list[dict[str, Any]] = []
    seen: set[int] = set()
    for role, parameters in (("actor", actor), ("critic", critic)):
        trained = [weight for weight in parameters if weight.requires_grad and id(weight) not in seen]
        seen.update(id(weight) for weight in trained)

        matrices = [weight for weight in trained if weight.ndim >= 2]
        vectors = [weight for weight in trained if weight.ndim < 2]
        for decay, members in ((weight_decay, matrices), (0.0, vectors)):
            if members:
                groups.append({"params": members, "weight_decay": decay, "role": role})
    return groups


def optimizer_class_of(id: str) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer by its id; that of torchao is imported here.

    Raises:
        MissingExtraError: it is not installed.
    """
    if id == ADAMW:
        return torch.optim.AdamW
    require_extra("torchao", extra="torchao", needed_by=f"optimizer: {{id: {ADAMW_8BIT}}}")
    from rl4lms_like.policies.adamw_8bit import AdamW8bit

    return AdamW8bit


def bytes_of_moments(shapes: Iterable[Sequence[int]], arguments: PolicyArguments, n_processes: int = 1) -> float:
    """Return the bytes of the two moments of AdamW in one of the processes that split them, for estimates.

    Args:
        shapes: of the trained weights.
        arguments: of the policy.
        n_processes: number of these processes.
    """
    # As `AdamW8bit` stores each moment: codes of one byte, a scale for each block, and the values of the 256 codes.
    block_size = int(arguments.optimizer_kwargs.get("block_size", 256))
    n_bytes = 0.0
    for shape in shapes:
        size = math.prod(shape) / n_processes
        if arguments.optimizer["id"] == ADAMW_8BIT and rows_of_blocks(shape, block_size, n_processes) is not None:
            n_bytes += 2 * (size + 4 * size / block_size + 4 * 256)
        else:
            n_bytes += 2 * 4 * size
    return n_bytes


def make_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    *,
    learning_rate: float,
    optimizer_kwargs: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """Return the optimizer; Adam and AdamW are fused unless `optimizer_kwargs` set `fused` or `foreach`."""
    # Each group has a `weight_decay` of its own.
    kwargs = {name: value for name, value in optimizer_kwargs.items() if name != "weight_decay"}
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & set(kwargs):
        kwargs["fused"] = True

    # Not every optimizer class has a learning rate.
    if "lr" in inspect.signature(optimizer_class).parameters:
        kwargs.setdefault("lr", learning_rate)
    return optimizer_class(groups, **kwargs)


def offload_moments(optimizer: torch.optim.Optimizer) -> None:
    """Move the moments of all parameters to main memory; those of split weights are the rows of this process."""
    is_on_gpu = False
    for weight, name, moment in _moments(optimizer):
        is_on_gpu |= moment.is_cuda
        optimizer.state[weight][name] = moment.to("cpu")

    # torch keeps freed memory for tensors of its own. A server on the same GPU is another process.
    if is_on_gpu:
        torch.cuda.empty_cache()


def return_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Move each moment to the device of its parameter; a hook that torch calls before an optimizer step."""
    for weight, name, moment in _moments(optimizer):
        optimizer.state[weight][name] = moment.to(weight.device)


def _moments(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
    """Return parameter, name and value of each moment."""
    moments = []
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            # A tensor without dimensions is the number of steps, which torch has on the device of its choice.
            if isinstance(value, torch.Tensor) and value.ndim:
                moments.append((weight, name, value))
    return moments
