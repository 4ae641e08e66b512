"""Weights that are split over the processes of a run (FSDP2, `torch.distributed.fsdp.fully_shard`).

    part of a network              in memory of each process
    always                         1/n of each weight, gradient and moment of the optimizer
    transformer blocks             one after the other whole, each for its forward and its backward pass
    all others (embeddings, head)  whole from the first forward pass to the end of the backward pass
    `gathered`                     everything whole within the block, so that generation does not communicate

Gradients are summed over the processes by the backward pass. Each forward and each backward pass of a network needs
all processes, in the same order.

Outside of this module, split tensors differ from others only in being `DTensor`s; `whole` and `like` convert them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class ShardedNetwork:
    """A language model whose weights are split over all processes, in place.

    Args:
        model: its weights are moved to the device of the mesh, block by block.
        mesh: returned by `process_mesh`.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._blocks = [shard(block, mesh) for block in reversed(blocks_of(model))]  # inner ones first
        self._root = shard(_Root(model), mesh)
        self._root(_nothing)  # the first module that runs becomes the root
        self._is_gathered = False
        self.reshard()

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that calls modules of the model.

        Readers call parts of a model, not its `forward`, on which torch would register its hooks.
        """
        result: T = self._root(work, *args)
        return result

    def reshard(self) -> None:
        """Free the whole weights; required before the split ones are changed or saved."""
        for unit in (*self._blocks, self._root):
            unit.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all weights whole within the block. All processes enter it together; within it they are independent."""
        if self._is_gathered:
            yield
            return
        self._keep(True)
        try:
            for unit in (*self._blocks, self._root):
                unit.unshard()
            yield
        finally:
            self._keep(False)
            self.reshard()

    def _keep(self, keep: bool) -> None:
        self._is_gathered = keep
        for block in self._blocks:
            block.set_reshard_after_forward(not keep, recurse=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of a language model; none if transformers does not name them."""
    names = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in names]


class _Root(nn.Module):
    """Module that contains a model, and whose forward pass is any function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)


def process_mesh(device: torch.device | str) -> DeviceMesh:
    """Return the devices of all processes, over which weights are split; `device` is that of this process."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.device(device).type, (torch.distributed.get_world_size(),))


def shard(module: nn.Module, mesh: DeviceMesh) -> Any:
    """Split the weights of a module that are not split yet, in place; return the module with FSDP's methods."""
    from torch.distributed.fsdp import fully_shard

    unit: Any = fully_shard(module, mesh=mesh)
    unit.set_gradient_divide_factor(1.0)  # the sum of the processes' gradients, not their mean
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    return unit


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, whole if it is split; all processes must call this together."""
    split: Any = tensor
    return split.full_tensor() if is_split(tensor) else tensor


def like(own: Tensor, value: Tensor) -> Tensor:
    """Return this process's part of a whole tensor if `own`, of the same shape, is split; otherwise the whole one."""
    if not is_split(own) or own.shape != value.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    split: Any = own
    return distribute_tensor(value.to(own.device), split.device_mesh, split.placements, src_data_rank=None)


def is_split(tensor: Any) -> bool:
    """Return whether this is a `DTensor`; torch.distributed.tensor is not imported for runs without any."""
    return hasattr(tensor, "full_tensor")


def plain_copy(model: Any) -> Any:
    """Return a copy in main memory of a language model of transformers whose weights are split, and gathered now.

    FSDP's hooks on `state_dict` would split the weights of the model itself again.
    """
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    with torch.device("meta"):
        copy = type(model)(model.config)
    copy.load_state_dict({name: each.detach().cpu() for name, each in tensors.items()}, strict=False, assign=True)
    copy.generation_config = model.generation_config
    return copy


@contextmanager
def whole_in_main(modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Replace split weights in the first process by whole ones in main memory, within the block.

    All processes must enter it together. The modules cannot be called in the block.

    Args:
        modules: their weights are replaced.
        optimizer: its moments are replaced too.
    """
    owners: list[dict[str, Any]] = [part._parameters for module in modules for part in module.modules()]
    if optimizer is not None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        owners += [optimizer.state[weight] for weight in weights if weight in optimizer.state]
    places = [(owner, name, each) for owner in owners for name, each in owner.items() if is_split(each)]
    is_main, found = torch.distributed.get_rank() == 0, {}
    for each in dict.fromkeys(each for _, _, each in places):  # tied weights once
        tensor = whole(each.detach())  # in all processes, one after the other
        if is_main:
            found[each] = nn.Parameter(tensor.cpu(), each.requires_grad)  # as a module needs it; harmless for moments
    try:
        for owner, name, each in places if is_main else ():
            owner[name] = found[each]
        yield
    finally:
        for owner, name, each in places:
            owner[name] = each


def _nothing() -> None:
    """Return None."""
