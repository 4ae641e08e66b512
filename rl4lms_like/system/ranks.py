"""Processes that train one model together. A single process and a process group of torch have the same interface.

    torchrun --nproc_per_node 2 -m rl4lms_like train config.yml

    rank 0   prompts 0 1 2 ─ generate, score ─┐          ┌─ episodes 0 1 of each minibatch ─┐
    rank 1   prompts 3 4 5 ─ generate, score ─┴─ gather ─┴─ episodes 2 3                   ─┴─ sum of gradients ─ step

Each process has all weights, or its part of them (`policies.sharding`). After `gather` all have the same episodes, so
whatever is computed from a whole rollout or minibatch (scale of the rewards, advantages, KL coefficient, order, loss
weights) is the same on all of them, and equal to that of a single process. Summed gradients have the same bits on every
process.

    method          what is exchanged                                         what each process has afterwards
    share           nothing: a calculation on sizes that all have             the numbers of its items
    gather          each sends a pickled item                                 all items, in the order of the ranks
    gather_from     each sends its error's message, or its result             all results, or an error in all
    from_main       the main process sends as in `gather_from`, others None   the result of the main process
    main_first      one `from_main`, before the block or after it             the files that the main process wrote
    any             each sends 0 or 1                                         whether the sum is above 0
    sum             a tensor of the same shape and type                       the sum, in the same bits
    sum_gradients   all gradients, and which of them exist, in one tensor     the sums

Everything but `share` is collective: it returns only after all processes have called it. torch does not compare the
calls, only their order counts. So a condition around such a call must have the same value in all processes, and loops
around it the same length; decide on gathered values, the config or the result of `any`, never on a process's own files,
clock or signals. If one process skips a call, the others wait in it until the timeout, or its next call is taken for
this one, and values are combined that do not belong together. If random numbers or the order of a set or folder differ
between processes, nothing waits and nothing fails: their minibatches have different episodes, and the summed gradient
is that of no minibatch.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rl4lms_like.system.errors import ConfigError, ConfigIssue, RankError, RL4LMsLikeError

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
_n_groups = 0
"""Process groups that this process has been a member of."""

_FAILURE = "failure"
"""Key under which a process announces its error."""


class Ranks:
    """A single process, and the base class of `ProcessGroup`.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        waited: seconds spent in communication so far, including waiting for the other processes.
    """

    rank = 0
    size = 1
    waited = 0.0

    @property
    def is_main(self) -> bool:
        """True in the process that writes files and messages."""
        return self.rank == 0

    def share(self, sizes: Sequence[int], rank: int | None = None) -> range:
        """Return this process's part of consecutive items; the sums of the sizes in the parts are about equal.

        Nothing is exchanged. The parts cover each item once, because all processes calculate with the same sizes.

        Args:
            sizes: of all items.
            rank: return the part of that process instead.

        Examples:
            >>> Ranks().share([3, 1, 2])
            range(0, 3)
        """
        # The line of all items is cut into `size` parts of equal length. An item belongs to the part with its center,
        # so an item that is longer than a part leaves another process with none. If all sizes are 0, rank 0 has all.
        ends = np.cumsum(sizes)
        centers = ends - np.asarray(sizes) / 2
        owners = np.minimum(centers * self.size // max(int(sum(sizes)), 1), self.size - 1)

        # Owners increase along the items, so the items of one process are consecutive.
        rank = self.rank if rank is None else rank
        start = np.searchsorted(owners, rank)
        stop = np.searchsorted(owners, rank, side="right")
        return range(int(start), int(stop))

    def gather(self, item: T) -> list[T]:
        """Return the items of all processes, in the order of their ranks.

        With several processes all items are copies, also this process's own; their tensors are on its device. If
        computing the item can fail, use `gather_from`: a process that never calls this leaves the others waiting.
        """
        return [item]

    def gather_from(self, work: Callable[[], T]) -> list[T]:
        """Run a function in every process and return all results. If it fails in one of them, all raise.

        The function itself must not communicate: if it failed before that, the others would wait within it.

        Raises:
            RankError: it failed in another process. The failing process raises its own error.
        """
        return [work()]

    def from_main(self, work: Callable[[], T]) -> T:
        """Run a function in the main process only, and return its result in all.

        All processes call this, with any function: those of the others are not run.

        Raises:
            RankError: it failed. The main process raises its own error.
        """
        return self.gather_from(work if self.is_main else _nothing)[0]  # type: ignore[return-value]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block in the main process, and afterwards in the others, so that they find its files.

        The block must not communicate: the main process would be in the block's call, the others still before it.
        """
        # Each process makes the same one call: the others before the block, where they wait; the main process after it.
        if not self.is_main:
            self.from_main(_nothing)
        yield
        if self.is_main:
            self.from_main(_nothing)

    def any(self, flag: bool) -> bool:
        """Return True if the flag is True in any process.

        This turns what only one process has, such as a signal, into a condition that all can act on.
        """
        return flag

    def sum(self, tensor: Tensor) -> None:
        """Replace the values of a tensor by their sums over all processes.

        Shape, data type and kind of device must be the same in all.
        """

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their sums over all processes. Parameters that are unused in all keep None.

        The same parameters, in the same order, must require gradients in all. Some may have no gradient in a process
        that has not used them.
        """


class ProcessGroup(Ranks):
    """The process group of torch that `torchrun` describes in the environment; use it as a context manager.

    Args:
        timeout: seconds that a process waits for the others.

    Raises:
        RankError: raised by every method that communicates, if another process ended or the timeout passed.
    """

    def __init__(self, timeout: float) -> None:
        # Imported here: the command line imports this module, and must answer without loading torch.
        import torch
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self._torch = torch
        self._dist = dist
        self.timeout = timeout

        # One GPU per process; NCCL, which connects the current devices, needs it to be set first.
        has_gpu = torch.cuda.is_available()
        if has_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.device = torch.device("cuda" if has_gpu else "cpu")

        # By the tensor's device: NCCL sums gradients on GPUs; gathered bytes and the flags of `any` stay on the CPU.
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        limit = timedelta(seconds=timeout)
        store, rank, size = next(rendezvous("env://", timeout=limit))

        # Each group of a program has keys of its own. In those of the group before it, a process that is faster than
        # the others would find addresses at which nobody listens any more.
        global _n_groups
        _n_groups += 1
        keys = dist.distributed_c10d.PrefixStore(f"group_{_n_groups}", store)
        dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=limit)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

        # Shared keys and values outside of the collective calls, with which a process can still name its error when
        # the others already wait for it.
        self._store = dist.distributed_c10d._get_default_store()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        # A forward or backward pass of split weights needs all processes, but does not go through this class: where it
        # fails with torch's own error, the cause is that of another process.
        if isinstance(error, RuntimeError) and (reason := self._announced()):
            raise RankError(reason) from error

        # A `RankError` is a consequence, and would replace its cause in the store. At Ctrl-C the processes have agreed
        # where to stop (`system.interruption`), and none waits.
        if error is not None and not isinstance(error, RankError | KeyboardInterrupt):
            self._announce(error)

        # After an error it would wait for processes that have ended.
        if error is None:
            self._dist.destroy_process_group()

    def gather(self, item: T) -> list[T]:
        buffer = io.BytesIO()
        self._torch.save(item, buffer)

        # As bytes, so that tensors of another process's GPU are loaded to this process's device.
        pickled: list[Any] = [None] * self.size  # by rank
        with self._communicating():
            self._dist.all_gather_object(pickled, buffer.getvalue())

        # Without `weights_only`: pickled by the processes of this run a moment ago; no file is read.
        items = []
        for content in pickled:
            items.append(self._torch.load(io.BytesIO(content), map_location=self.device, weights_only=False))
        return items

    def gather_from(self, work: Callable[[], T]) -> list[T]:
        # A process whose work fails takes part in the exchange all the same: the others would wait for it until the
        # timeout. Not for a KeyboardInterrupt, with which a user ends the process at once.
        failure = None
        result = None
        try:
            result = work()
        except Exception as error:
            failure = error
        message = None if failure is None else _described(failure)
        answers = self.gather((message, result))

        # All processes raise or none does. The error of this process itself has the traceback; of several errors in
        # other processes, that of the lowest rank is reported.
        if failure is not None:
            raise failure
        results: list[T] = []
        for rank, (rank_message, rank_result) in enumerate(answers):
            if rank_message is not None:
                raise RankError(f"rank {rank} failed: {rank_message}")
            results.append(rank_result)  # type: ignore[arg-type]
        return results

    def any(self, flag: bool) -> bool:
        # On the CPU: this is called after every step, and must not wait until the GPU has finished its work.
        n_true = self._torch.tensor(int(flag))
        self.sum(n_true)
        return bool(n_true)

    def sum(self, tensor: Tensor) -> None:
        # Unlike separate additions in each process, one all-reduce gives the same bits to all, which keeps weights
        # equal without ever comparing them.
        with self._communicating():
            self._dist.all_reduce(tensor)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        torch = self._torch
        trained = [parameter for parameter in parameters if parameter.requires_grad]

        # A process may have no gradient where another has one (no episode of its own, an unused head). It adds zeros,
        # so that the tensor has the same layout everywhere: [gradients in the order of `trained`, one flag for each].
        # In float32: sums of bfloat16 gradients would lose bits with each process.
        pieces = []
        flags = []
        for parameter in trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pieces.append(gradient.reshape(-1).float())
            flags.append(float(parameter.grad is not None))
        flat = torch.cat([*pieces, torch.tensor(flags, device=self.device)])
        self.sum(flat)

        # None if no process has a gradient: an optimizer would still move such a parameter by its momentum and weight
        # decay if it had zeros.
        *sums, n_used = flat.split([*(parameter.numel() for parameter in trained), len(trained)])
        for parameter, total, n_with_gradient in zip(trained, sums, n_used.tolist(), strict=True):
            if n_with_gradient:
                parameter.grad = total.view_as(parameter).to(parameter.dtype)

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Convert an error of the communication into one that names its cause, if a process announced it."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            # torch reports a closed connection. What closed it is in the store, unless that process was killed, or
            # the timeout has passed because a process skipped a call.
            reason = f"another process of the run ended, or did not answer within {self.timeout:g} s"
            raise RankError(self._announced() or reason) from error
        finally:
            self.waited += time.perf_counter() - start

    def _announced(self) -> str | None:
        """Return the error that another process announced."""
        # The process that holds the store (rank 0) may have ended too. `get` alone would wait for the key.
        with suppress(RuntimeError):
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode())
        return None

    def _announce(self, error: BaseException) -> None:
        """Store the error, for the processes that wait for this one."""
        with suppress(RuntimeError):
            self._store.set(_FAILURE, f"rank {self.rank} failed: {_described(error)}")


@contextmanager
def process_ranks(timeout: float) -> Iterator[Ranks]:
    """Yield the processes that `torchrun` has started, or this process alone.

    Args:
        timeout: seconds that a process waits for the others.

    Raises:
        ConfigError: `accelerate launch` was to start several processes, and has started one.
        RL4LMsLikeError: the processes cannot be connected.
    """
    if not is_distributed():
        _refuse_one_of_several()
        yield Ranks()
        return

    try:
        group = ProcessGroup(timeout)
    except RuntimeError as error:
        raise RL4LMsLikeError(f"the processes started by torchrun cannot be connected: {error}") from error

    # The run is within the group's block: an error that leaves it is announced to the processes that wait.
    with group:
        yield group


def _refuse_one_of_several() -> None:
    """Raise if this process was to be one of several: without GPUs, `accelerate launch` starts one for all of them."""
    # It sets the address where processes meet only for more than one, and for GPUs all variables of torchrun.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "LOCAL_RANK" not in os.environ:
        message = "it has not connected its processes, each would train alone; start them with torchrun"
        command = "torchrun --nproc_per_node 2 -m rl4lms_like train run.yml"
        raise ConfigError([ConfigIssue("", f"{message}: {command}")], "accelerate launch")


def is_distributed() -> bool:
    """Return True if this process is one of several that `torchrun` has started."""
    return n_processes() > 1


def n_processes() -> int:
    """Return the number of processes that `torchrun` has started; 1 without it."""
    # torchrun sets both. WORLD_SIZE alone may be that of another launcher, whose processes do not belong to this run.
    if "LOCAL_RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return True unless `torchrun` has started this process with a rank above 0."""
    return not is_distributed() or os.environ.get("RANK") == "0"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """Return None."""
