"""Weights that are split over the processes of a run (FSDP2, `torch.distributed.fsdp.fully_shard`).

    part of a network              in memory of each process
    always                         1/n of each weight, gradient and moment of the optimizer
    transformer blocks             one after the other whole, each for its forward and its backward pass; with
                                   `reshard_after_forward=False` from its forward to the end of its backward pass
    all others (embeddings, head)  whole from the first forward pass to the end of the backward pass
    `gathered`                     everything whole within the block, so that generation does not communicate
    `led_by_main`                  one tensor at a time whole, to save it or to pass it on

Gradients are summed over the processes by the backward pass. Each forward and each backward pass of a network needs
all processes, in the same order.

Weights that are not read yet when a network is split (`policies.unread_weights`) are read then: by each process its
rows.

Outside of this module, split tensors differ from others only in being `DTensor`s; `whole` and `like` convert them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from rl4lms_like.policies.unread_weights import UnreadTensor
from rl4lms_like.system.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class ShardedNetwork:
    """A language model whose weights are split over all processes, in place.

    Args:
        model: its weights are moved to the device of the mesh, block by block. Of those that are not read yet
            (`policies.unread_weights`), each process reads its rows.
        mesh: returned by `process_mesh`.
        reshard_after_forward: free a block after its forward pass, and gather it again for its backward pass.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool = True) -> None:
        self.model = model
        self._reshards = reshard_after_forward
        places = set_aside(model)
        separate_frozen_weights(model)

        # Inner modules first: each unit has the weights that are not split yet.
        self._blocks = [shard(block, mesh) for block in reversed(blocks_of(model))]
        self._root = shard(_Root(model), mesh)
        read_rows(places)
        require_values(model)

        # The first module that runs becomes FSDP's root. A private method of torch makes it this one: an empty pass
        # would do so too, but gather all weights outside of blocks.
        self._root._get_fsdp_state()._lazy_init()
        self._is_gathered = False

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that calls modules of the model.

        Readers call parts of a model, not its `forward`, on which torch would register its hooks.
        """
        # A pass without gradients is followed by no backward pass that would free the blocks.
        if not self._reshards and not self._is_gathered:
            self._set_reshard_after_forward(not torch.is_grad_enabled())
        result: T = self._root(work, *args)
        return result

    def reshard(self) -> None:
        """Free the whole weights; required before the split ones are changed or saved."""
        for unit in (*self._blocks, self._root):
            unit.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all weights whole within the block. All processes enter it together; within it they are independent."""
        # Within another such block, whose end frees the weights.
        if self._is_gathered:
            yield
            return

        self._is_gathered = True
        self._set_reshard_after_forward(False)
        try:
            for unit in (*self._blocks, self._root):
                unit.unshard()
            yield
        finally:
            self._is_gathered = False
            self._set_reshard_after_forward(True)
            self.reshard()

    def _set_reshard_after_forward(self, value: bool) -> None:
        """Choose whether blocks are freed after a forward pass. The root never is."""
        for block in self._blocks:
            block.set_reshard_after_forward(value, recurse=False)


Place = tuple[nn.Module, str]
"""A module, and the name of one of its parameters."""


def set_aside(model: nn.Module) -> dict[UnreadTensor, list[Place]]:
    """Replace the unread weights of a model by parameters on torch's `meta` device, in place; tied ones stay tied.

    Returns:
        The unread weights with their places; a tied weight has several.
    """
    places: dict[UnreadTensor, list[Place]] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, UnreadTensor):
                places.setdefault(weight, []).append((module, name))

    for unread, places_of_weight in places.items():
        without_values = torch.empty(unread.shape, dtype=unread.dtype, device="meta")
        _set_parameter(places_of_weight, nn.Parameter(without_values, requires_grad=unread.requires_grad))
    return places


def read_rows(places: Mapping[UnreadTensor, list[Place]]) -> None:
    """Read this process's rows of the weights that `set_aside` returned, after the model has been split."""
    for unread, places_of_weight in places.items():
        module, name = places_of_weight[0]
        split = getattr(module, name)
        weight = nn.Parameter(_rows_of_this_process(split, unread), requires_grad=split.requires_grad)
        _set_parameter(places_of_weight, weight)


def _rows_of_this_process(split: Any, unread: UnreadTensor) -> Tensor:
    """Return an unread tensor split as another one is, of which this process has read its rows."""
    rows = unread.rows(*rows_here(split, split.shape[0]))
    return split_as(split, rows.to(split.device_mesh.device_type), split.shape)


def rows_here(template: Tensor, n_rows: int) -> tuple[int, int]:
    """Return the first row of this process, and the one after its last, of `n_rows` that are split as `template` is."""
    if not is_split(template):
        return 0, n_rows
    from torch.distributed.tensor import distribute_tensor

    # The numbers of the rows are distributed as the rows themselves. There may be none: of 3 rows, the fourth process
    # has none.
    split: Any = template
    numbers = torch.arange(n_rows, device=split.device_mesh.device_type)
    here = distribute_tensor(numbers, split.device_mesh, split.placements, src_data_rank=None).to_local()
    return (int(here[0]), int(here[-1]) + 1) if len(here) else (0, 0)


def split_as(template: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the tensor of a shape of which this process has these rows, split as `template` is.

    They share memory. If `template` is whole, the rows are all there are, and returned as they are.
    """
    if not is_split(template):
        return rows
    from torch.distributed.tensor import DTensor

    split: Any = template
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(rows, split.device_mesh, split.placements, run_check=False, shape=size, stride=stride)


def rows_of_blocks(shape: Sequence[int], block_size: int, n_processes: int = 1) -> int | None:
    """Return the smallest number of a weight's rows that has whole blocks; None if its moments are not in 8 bits.

    They are if the weight has at least 4096 elements, all in whole blocks, and if each process that splits its rows has
    some, and whole blocks of them. The blocks of a moment in 8 bits are therefore the same for any number of processes.

    Args:
        shape: of the whole weight.
        block_size: number of elements with a common scale, which follow each other.
        n_processes: number of processes that split the rows; each has as many as the first one, the last one the rest.
    """
    size = math.prod(shape)
    if size < 4096:  # as torchao does
        return None

    # The smallest number of rows whose elements are a multiple of a block.
    n_rows = block_size // math.gcd(size // shape[0], block_size)

    # All processes but the last one have equally many rows; the last one has the rest, which may be none.
    rows_of_process = math.ceil(shape[0] / n_processes)
    all_have_rows = rows_of_process * (n_processes - 1) < shape[0]
    have_whole_blocks = shape[0] % n_rows == 0 and rows_of_process % n_rows == 0
    return n_rows if all_have_rows and have_whole_blocks else None


def require_values(model: nn.Module) -> None:
    """Raise if a weight or buffer of a model has no values.

    Raises:
        ModelError: names them.
    """
    names = []
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if own_part(tensor).is_meta or isinstance(tensor, UnreadTensor):
            names.append(name)
    if names:
        raise ModelError(f"weights of {type(model).__name__} have not been read: {', '.join(names[:3])}")


def _set_parameter(places: Iterable[Place], parameter: nn.Parameter) -> None:
    """Set a parameter in each of its places."""
    for module, name in places:
        setattr(module, name, parameter)


def separate_frozen_weights(model: nn.Module) -> None:
    """Replace the frozen weights of a model by others with the same memory, in place; tied ones stay tied.

    Networks with adapters share frozen weights. Splitting one of them moves its weights to the device in place, where
    those of the others would stay whole until they are split too.
    """
    own_weights: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if not weight.requires_grad:
                own_weight = own_weights.setdefault(weight, nn.Parameter(weight.detach(), requires_grad=False))
                setattr(module, name, own_weight)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of a language model; none if transformers does not name them."""
    return [module for _, module in named_blocks(model)]


def named_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the transformer blocks of a language model with their names, also if they are split."""
    classes = getattr(model, "_no_split_modules", None) or ()
    named = []
    for name, module in model.named_modules():
        if type(module).__name__.removeprefix("FSDP") in classes:  # the prefix is that of torch
            named.append((name, module))
    return named


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
    """Return a tensor, whole if it is split.

    All processes must call this together, or only the main one within `led_by_main`.
    """
    if not is_split(tensor):
        return tensor
    split: Any = tensor
    if _leading is not None:
        _sent(_leading.places[own_part(tensor).data_ptr()])
    return _gathered(split)


def _gathered(split: Any) -> Tensor:
    """Return a whole tensor, to which each process sends its part."""
    # Moments may be in main memory, from which NCCL sends nothing.
    full: Tensor = split.to(split.device_mesh.device_type).full_tensor()
    return full


def n_processes_of(tensor: Tensor) -> int:
    """Return the number of processes that split a tensor; 1 if it is whole."""
    split: Any = tensor
    return int(split.device_mesh.size()) if is_split(tensor) else 1


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor if it is split; otherwise the whole one."""
    split: Any = tensor
    return split.to_local() if is_split(tensor) else tensor


def like(template: Tensor, value: Tensor) -> Tensor:
    """Return this process's part of a whole tensor if `template`, of its shape, is split; otherwise the whole one.

    Of an unread tensor, no more than that is read.
    """
    is_like_template = is_split(template) and template.shape == value.shape
    if isinstance(value, UnreadTensor):
        return _rows_of_this_process(template, value) if is_like_template else value.rows(0, len(value))
    if not is_like_template:
        return value
    from torch.distributed.tensor import distribute_tensor

    # No source: every process has read the same value, so nothing is sent.
    split: Any = template
    return distribute_tensor(value.to(template.device), split.device_mesh, split.placements, src_data_rank=None)


@contextmanager
def loading_whole_weights(model: nn.Module) -> Iterator[None]:
    """Let `model.load_state_dict` copy whole tensors into split weights within the block, each process its part."""

    def split_tensors(_module: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
        for name, weight in model.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = like(weight, state[name])

    hook = model.register_load_state_dict_pre_hook(split_tensors)
    try:
        yield
    finally:
        hook.remove()


def is_split(tensor: Any) -> bool:
    """Return whether this is a `DTensor`; torch.distributed.tensor is not imported for runs without any."""
    return hasattr(tensor, "full_tensor")


@contextmanager
def led_by_main(
    modules: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    works: Mapping[str, Callable[[], Any]] | None = None,
) -> Iterator[None]:
    """Let the main process read split tensors within the block, in any order and number, with `whole`.

    All processes must enter it together; the block's work is the main one's. The others stay here until it has left the
    block. They take part in each gather and drop the tensor, so that none of them has more than one at a time.

    Args:
        modules: their weights can be read.
        optimizer: its moments can be read too.
        works: by name, what `with_all` lets the other processes do, such as their part of a forward pass.
    """
    global _leading
    split = dict.fromkeys(_split_tensors(modules, optimizer))  # tied weights once
    names = list(works or ())
    if torch.distributed.get_rank() == 0:
        # A detached tensor is another object with the same memory.
        places = {own_part(tensor).data_ptr(): number for number, tensor in enumerate(split)}
        _leading = _Leading(places, names)
        try:
            yield
        finally:
            _leading = None
            _sent(_END)
        return

    tensors = list(split)
    while (number := _sent(_END)) != _END:
        if number < len(tensors):
            _gathered(tensors[number])
        elif works is not None:
            works[names[number - len(tensors)]]()
    yield


@dataclass(frozen=True)
class _Leading:
    """Requests that the main process can make of the others: numbers of tensors by their addresses, names of works."""

    places: dict[int, int]
    works: list[str]


_leading: _Leading | None = None
"""In the main process within `led_by_main`. Like torch's process group, one for the process: what reads a weight then
need not know whether it is split."""
_END = -1


def _sent(number: int) -> int:
    """Return the number that the main process sends to the others."""
    message = torch.tensor(number)  # in main memory, also if the weights are on GPUs
    torch.distributed.broadcast(message, 0)
    return int(message)


def with_all(name: str) -> None:
    """Let the other processes do their part of a work, if this is the main one within `led_by_main`."""
    if _leading is not None:
        _sent(len(_leading.places) + _leading.works.index(name))


def _split_tensors(modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """Return the split weights of modules and moments of an optimizer, in the same order in all processes."""
    holders: list[Mapping[str, Any]] = []
    for module in modules:
        holders += [submodule._parameters for submodule in module.modules()]

    # As states have them: moments in 8 bits are several tensors there.
    if optimizer is not None:
        holders += [moments for _, moments in sorted(optimizer.state_dict()["state"].items())]
    return [tensor for holder in holders for tensor in holder.values() if is_split(tensor)]
