"""Processes that train one model together. A single process and a process group of torch have the same interface.

    torchrun --nproc_per_node 2 -m rl4lms_like train config.yml

    rank 0   prompts 0 1 2 ─ generate, score ─┐          ┌─ episodes 0 1 of each minibatch ─┐
    rank 1   prompts 3 4 5 ─ generate, score ─┴─ gather ─┴─ episodes 2 3                   ─┴─ sum of gradients ─ step

Each process has all weights, or its part of them (`policies.sharding`). After `gather` all have the same episodes, so
whatever is computed from a whole rollout or minibatch (scale of the rewards, advantages, KL coefficient, order, loss
weights) is the same on all of them, and equal to that of a single process. Summed gradients have the same bits on every
process.
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

from rl4lms_like.core.errors import RankError, RL4LMsLikeError

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
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

        Args:
            sizes: of all items.
            rank: return the part of that process instead.

        Example:
            >>> Ranks().share([3, 1, 2])
            range(0, 3)
        """
        ends = np.cumsum(sizes)
        centers = ends - np.asarray(sizes) / 2
        owners = np.minimum(centers * self.size // max(int(sum(sizes)), 1), self.size - 1)
        rank = self.rank if rank is None else rank
        start, stop = np.searchsorted(owners, rank), np.searchsorted(owners, rank, side="right")
        return range(int(start), int(stop))

    def gather(self, item: T) -> list[T]:
        """Return the items of all processes, in the order of their ranks."""
        return [item]

    def gather_from(self, work: Callable[[], T]) -> list[T]:
        """Run a function in every process and return all results. If it fails in one of them, all raise.

        Raises:
            RankError: it failed in another process. The failing process raises its own error.
        """
        return [work()]

    def from_main(self, work: Callable[[], T]) -> T:
        """Run a function in the main process only, and return its result in all.

        Raises:
            RankError: it failed. The main process raises its own error.
        """
        return self.gather_from(work if self.is_main else _nothing)[0]  # type: ignore[return-value]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block in the main process, and afterwards in the others, so that they find its files."""
        if not self.is_main:
            self.from_main(_nothing)
        yield
        if self.is_main:
            self.from_main(_nothing)

    def any(self, flag: bool) -> bool:
        """Return True if the flag is True in any process."""
        return flag

    def sum(self, tensor: Tensor) -> None:
        """Replace the values of a tensor by their sums over all processes."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their sums over all processes. Parameters that are unused in all keep None."""


class ProcessGroup(Ranks):
    """The process group of torch that `torchrun` describes in the environment; use it as a context manager.

    Args:
        timeout: seconds that a process waits for the others.

    Raises:
        RankError: raised by every method that communicates, if another process ended or the timeout passed.
    """

    def __init__(self, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self.timeout = torch, dist, timeout
        if has_gpu := torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.device = torch.device("cuda" if has_gpu else "cpu")
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, place: Any) -> None:
        if isinstance(error, RuntimeError) and (reason := self._announced()):  # of a pass that needs all processes
            raise RankError(reason) from error
        if error is not None and not isinstance(error, RankError | KeyboardInterrupt):
            self._announce(error)
        if error is None:
            self._dist.destroy_process_group()  # after an error it would wait for processes that have ended

    def gather(self, item: T) -> list[T]:
        buffer = io.BytesIO()
        self._torch.save(item, buffer)
        found: list[Any] = [None] * self.size
        with self._communicating():
            self._dist.all_gather_object(found, buffer.getvalue())
        # Pickled by the processes of this run a moment ago; no file is read.
        load = self._torch.load
        return [load(io.BytesIO(each), map_location=self.device, weights_only=False) for each in found]

    def gather_from(self, work: Callable[[], T]) -> list[T]:
        failure, item = None, None
        try:
            item = work()
        except Exception as error:
            failure = error
        results = self.gather((None if failure is None else _described(failure), item))
        if failure is not None:
            raise failure
        for rank, (message, _) in enumerate(results):
            if message is not None:
                raise RankError(f"rank {rank} failed: {message}")
        return [found for _, found in results]  # type: ignore[misc]

    def any(self, flag: bool) -> bool:
        found = self._torch.tensor(int(flag))  # on the CPU: asked after every step, and needs no GPU
        self.sum(found)
        return bool(found)

    def sum(self, tensor: Tensor) -> None:
        with self._communicating():
            self._dist.all_reduce(tensor)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        torch = self._torch
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
        used = torch.tensor([float(each.grad is not None) for each in trained], device=self.device)
        flat = torch.cat([part.reshape(-1).float() for part in parts] + [used])
        self.sum(flat)
        *sums, used = flat.split([*(each.numel() for each in trained), len(trained)])
        for parameter, total, is_used in zip(trained, sums, used.tolist(), strict=True):
            if is_used:
                parameter.grad = total.view_as(parameter).to(parameter.dtype)

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Convert an error of the communication into one that names its cause, if a process announced it."""
        start = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            reason = f"another process of the run ended, or did not answer within {self.timeout:g} s"
            raise RankError(self._announced() or reason) from error
        finally:
            self.waited += time.perf_counter() - start

    def _announced(self) -> str | None:
        """Return the error that another process announced."""
        with suppress(RuntimeError):  # the process that holds the store may have ended too
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
        RL4LMsLikeError: the processes cannot be connected.
    """
    if not is_distributed():
        yield Ranks()
        return
    try:
        group = ProcessGroup(timeout)
    except RuntimeError as error:
        raise RL4LMsLikeError(f"the processes started by torchrun cannot be connected: {error}") from error
    with group:
        yield group


def is_distributed() -> bool:
    """Return True if this process is one of several that `torchrun` has started."""
    return n_processes() > 1


def n_processes() -> int:
    """Return the number of processes that `torchrun` has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def is_main_process() -> bool:
    """Return True unless `torchrun` has started this process with a rank above 0."""
    return not is_distributed() or os.environ.get("RANK") == "0"


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """Return None."""
