"""Weights of a policy that are broadcast to the workers of vLLM servers, in place of files.

    once              POST /shutdown_weight_transfer_engine, /init_weight_transfer_engine    all join a process group
    at a new version  POST /start_weight_update
    for each bucket   POST /update_weights: names, types and shapes; meanwhile the tensors, one after the other
    at the end        POST /finish_weight_update

This process has rank 0 of the group, the workers of the servers have the ranks from 1 on. The protocol is that of vLLM
0.32 for trainers that do not import vLLM (docs/training/weight_transfer and examples/rl/rlhf_http_nccl_no_vllm.py in
its repository), without packing.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # `torch.distributed` has it too, but without a type

from rl4lms_like.system.errors import EngineError

BUCKET = 2**28
"""Bytes from which the tensors of a request are sent."""
LOOPBACK = "127.0.0.1"

Result = TypeVar("Result")


class WeightTransfer:
    """Process group of this process and the workers of all servers.

    Args:
        post: sends each server its request, all at the same time and each once: a repeated one would wait for tensors
            that were sent already.
        n_servers: number of servers.
        n_workers: number of workers of each server.
        backend: `nccl`, the only one of vLLM, or `gloo`, for servers without GPUs.
        device: device of the tensors, a GPU for `nccl`.
        timeout_s: time limit of joining and of a broadcast in seconds.

    Raises:
        EngineError: a server failed, or the group could not be joined.
    """

    def __init__(
        self,
        post: Callable[[str, Sequence[Mapping[str, Any]]], None],
        *,
        n_servers: int,
        n_workers: int,
        backend: Literal["nccl", "gloo"],
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._post = post
        self._n_servers = n_servers
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._size = 1 + n_servers * n_workers
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

        # A server may still be in the group of an interrupted run.
        self._post_all("/shutdown_weight_transfer_engine", {})

        # Opening the group returns when all have joined it, which the servers do during their request.
        opening = _in_background(self._open_nccl if backend == "nccl" else self._open_gloo)
        try:
            how_to_join = self._nccl_id(opening) if backend == "nccl" else self._address()
        except RuntimeError as error:
            raise EngineError(f"NCCL could not be started to send weights to the engine: {error}") from error
        bodies = []
        for server in range(n_servers):
            info = {**how_to_join, "rank_offset": 1 + server * n_workers, "world_size": self._size, "packed": False}
            bodies.append({"init_info": info})
        self._post_during(opening, "/init_weight_transfer_engine", bodies)
        self._group = opening.result()

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send names and whole tensors to all workers, with no more than a bucket of them in memory.

        Raises:
            EngineError: a server failed.
        """
        self._post_all("/start_weight_update", {})
        for bucket in _buckets(weights):
            description = {
                "names": [name for name, _ in bucket],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }

            # The workers receive the tensors during the request, in the order of its description.
            sending = _in_background(self._broadcast, [tensor for _, tensor in bucket])
            self._post_during(sending, "/update_weights", [{"update_info": description}] * self._n_servers)
        self._post_all("/finish_weight_update", {})

    def _post_all(self, path: str, body: Mapping[str, Any]) -> None:
        self._post(path, [body] * self._n_servers)

    def _post_during(self, work: Future[Any], path: str, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Send requests during which the workers take part in work of this process, and wait for both."""
        # If a request fails, the work may never end, because a worker does not take part in it. Its thread is left.
        try:
            self._post(path, bodies)
        except EngineError as error:
            if work.done() and work.exception() is not None:
                raise EngineError(f"{error}; in this process: {work.exception()}") from work.exception()
            raise
        try:
            work.result()
        except RuntimeError as error:
            raise EngineError(f"the weights could not be sent to the engine ({path}): {error}") from error

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in tensors:
            self._group.broadcast([tensor.to(self._device).contiguous()], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # --- ways to join the group -------------------------------------------------------------------------------------

    def _open_nccl(self) -> Any:
        torch.cuda.set_device(self._device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group: Any = dist.ProcessGroupNCCL(self._store, 0, self._size, options)

        # The first operation creates the communicator. vLLM's workers begin with this one too.
        group.allreduce([torch.zeros(1, device=self._device)]).wait()
        torch.cuda.synchronize(self._device)
        return group

    def _nccl_id(self, opening: Future[Any]) -> dict[str, Any]:
        """Return the id of NCCL's communicator, which torch stores under "0" for the other ranks of a group.

        Args:
            opening: the opening of the group, which first stores the id and then waits for the workers.
        """
        # With a connection of its own: the one of the other thread waits for the workers.
        reader = TCPStore(LOOPBACK, self._store.port, is_master=False, timeout=self._timeout)
        reading = _in_background(reader.get, "0")

        # If NCCL cannot be started, there is no id to wait for, and its own error is the cause.
        wait([reading, opening], return_when=FIRST_COMPLETED)
        if not reading.done():
            opening.result()
        return {"nccl_unique_id_b64": base64.b64encode(reading.result()).decode()}

    def _open_gloo(self) -> Any:
        return dist.ProcessGroupGloo(self._store, 0, self._size, self._timeout)

    def _address(self) -> dict[str, Any]:
        return {"master_address": LOOPBACK, "master_port": self._store.port}


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield consecutive weights with `BUCKET` bytes or a little more."""
    bucket: list[tuple[str, Tensor]] = []
    n_bytes = 0
    for name, tensor in weights:
        bucket.append((name, tensor))
        n_bytes += tensor.nbytes
        if n_bytes >= BUCKET:
            yield bucket
            bucket = []
            n_bytes = 0
    if bucket:
        yield bucket


def _in_background(work: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Return the result of work in a thread, which the end of the process does not wait for."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
