"""A worker is one system in a process of its own: it does one iteration when told to, and sleeps in between.

    driver -> worker    {"shape": {...}, "model": FOLDER, ...}     the job, one line
                        run                                        one iteration, please
                        (end of input)                             thank you, leave
    worker -> driver    {"event": "ready", ...}                    loaded
                        {"event": "iteration", "wall_s": ...}      done, with its measurements

A system asks `next_iteration()`, works, says `rollout_done()` on the way and `iteration_done(...)` at the end. What it
prints itself goes to standard error; standard output belongs to the protocol.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.workload import Shape

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
MIB = 2**20


def resident_mb() -> float:
    """Memory that this process holds now, MiB (on a machine without /proc: the most it ever held)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_mb()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def peak_mb() -> float:
    """The most memory that this process held, MiB.

    `ru_maxrss` of a child starts at its parent's size, so `VmHWM` is read where there is one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def gpu_peak_mb() -> float:
    """The most memory that tensors had on the GPU, MiB."""
    return torch.cuda.max_memory_allocated() / MIB


def machine_busy_s() -> float:
    """CPU seconds that all processes of the machine have used since it started, stolen time included."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return float("nan")
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_SECOND


def release_memory() -> None:
    """Give freed memory back to the system (glibc keeps it otherwise), so that others can have it meanwhile."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Worker:
    """The worker's end of the protocol.

    Attributes:
        job: what the driver asked for, as it came.
        shape: the work of an iteration.
        model: folder of the model and its tokenizer.
        seed: of prompts and samples.
        device: `cpu` or `cuda`.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.job: dict[str, Any] = json.loads(sys.stdin.readline())
        self.shape = Shape(**self.job["shape"])
        self.model: str = self.job["model"]
        self.seed: int = self.job["seed"]
        self.device: str = self.job.get("device", "cpu")
        torch.set_num_threads(self.job["threads"])
        torch.manual_seed(self.seed)
        self._after_imports_mb = resident_mb()
        self._rollout_wall: float | None = None
        self._rollout_cpu: float | None = None

    def ready(self, *packages: str) -> None:
        """Say that the system is loaded.

        Args:
            packages: whose versions belong into the results.
        """
        gc.collect()
        self._say(
            event="ready",
            versions={package: version(package) for package in ("torch", "transformers", *packages)},
            after_imports_mb=self._after_imports_mb,
            after_load_mb=resident_mb(),
        )

    def next_iteration(self) -> bool:
        """Sleep until the driver wants an iteration, then start the clocks.

        Returns:
            False when there is no more work.
        """
        if sys.stdin.readline().strip() != "run":
            return False
        self._rollout_wall = self._rollout_cpu = None
        self._busy, self._cpu, self._wall = machine_busy_s(), time.process_time(), time.perf_counter()
        return True

    def rollout_done(self) -> None:
        """The rollout is over, the update starts."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self._rollout_wall, self._rollout_cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def iteration_done(
        self, *, optimizer_steps: int, response_tokens: int, save: Callable[[str], object] | None = None, **extras: Any
    ) -> None:
        """Stop the clocks, when the GPU has done its work, and report.

        Args:
            optimizer_steps: that were really taken.
            response_tokens: that were really generated.
            save: writes the policy into the job's folder `save_to`, while the clocks stand.
            extras: anything else worth keeping, JSON.
        """
        if self.device == "cuda":
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        busy = machine_busy_s() - self._busy
        if save is not None:
            save(self.job["save_to"])
        if self.device == "cuda":
            extras = {"gpu_peak_mb": gpu_peak_mb(), **extras}
        self._say(
            event="iteration",
            wall_s=wall,
            rollout_s=self._rollout_wall,
            update_s=None if self._rollout_wall is None else wall - self._rollout_wall,
            cpu_s=cpu,
            rollout_cpu_s=self._rollout_cpu,
            others_cores=max(0.0, busy - cpu) / wall,
            load_average=os.getloadavg()[0],
            peak_mb=peak_mb(),
            resident_mb=resident_mb(),
            optimizer_steps=optimizer_steps,
            response_tokens=response_tokens,
            **extras,
        )
        if self.job.get("release_memory", False):
            release_memory()

    def _say(self, **message: Any) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


class UpdateWatch:
    """Sees from the outside where an update begins, and counts its optimizer steps; the same for every library.

    Args:
        worker: is told that the rollout is over at the first forward pass with gradients of an iteration.
        network: that the update trains.
        optimizer: torch's own; wrappers may swallow steps, this one takes them.
    """

    def __init__(self, worker: Worker, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._worker = worker
        self._in_rollout = True
        self.optimizer_steps = 0
        network.register_forward_pre_hook(self._on_forward)
        optimizer.register_step_post_hook(self._on_optimizer_step)

    def restart(self) -> None:
        """A new iteration begins."""
        self._in_rollout, self.optimizer_steps = True, 0

    def _on_forward(self, *_: Any) -> None:
        if self._in_rollout and torch.is_grad_enabled():
            self._in_rollout = False
            self._worker.rollout_done()

    def _on_optimizer_step(self, *_: Any) -> None:
        self.optimizer_steps += 1
