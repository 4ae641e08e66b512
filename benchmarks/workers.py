"""The driver's end of the protocol (the worker's end: `systems.worker`), and what it measures with it.

one shape:   start all systems -> round 0 (warm-up) -> round 1 -> ... -> round n -> end their input
one round:   one iteration of each system in turn, while the others sleep
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environments import python_of
from benchmarks.memory import available_mb, held_mb
from benchmarks.workload import Shape

ROOT = Path(__file__).parent.parent
LAST_WORDS = 3000  # characters of a dead worker's standard error


class WorkerError(RuntimeError):
    """A system died or did other work than it was asked for."""


@dataclass(frozen=True)
class System:
    """One contestant.

    Args:
        module: in `benchmarks.systems`.
        requirements: for its own environment; none = the one that runs the benchmark.
        job: what its job says beyond shape, model, seed and threads.
        environment: name of its environment; default: that of the module.
        checkout: the working tree whose library and worker are run.
    """

    module: str
    requirements: tuple[str, ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None
    checkout: Path = ROOT


# One environment of TRL for all benchmarks with it: VADER's scores are the reward in some of them.
VADER = "vaderSentiment==3.3.*"
IN_BFLOAT16 = {"dtype": "bfloat16", "generation_dtype": "float32", "reference_dtype": "bfloat16"}
SYSTEMS = {
    "ours": System("ours"),
    "ours_grpo": System("ours", job={"algorithm": "grpo"}),
    "ours_bfloat16": System("ours", job={"policy": IN_BFLOAT16}),
    "trl_ppo": System("trl_ppo", ("trl==1.12.*", VADER)),
    "bare": System("bare"),
    "bare_clip": System("bare", job={"bare_max_grad_norm": 0.5}),
    "trl_grpo": System("trl_grpo", ("trl==1.16.*", "peft", VADER)),
}


class WorkerProcess:
    """A system that runs, seen from the driver.

    Args:
        name: of the system.
        job: the worker's first line.
        log: where its standard error goes.
    """

    def __init__(self, name: str, job: Mapping[str, Any], log: Path) -> None:
        system = SYSTEMS[name]
        python = python_of((system.environment or system.module).replace("_", "-"), system.requirements)
        self.name, self.job = name, job
        self._log = log
        threads = str(job["threads"])
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            # The checkout before an editable installation of another one.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(system.checkout), os.environ.get("PYTHONPATH")])),
            **({} if job.get("device") == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
            **job.get("environment", {}),
        }
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.systems.{system.module}"],
                cwd=system.checkout,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._send(json.dumps({**job, **system.job}))
        self.loaded = self._receive("ready")

    def run_iteration(self) -> dict[str, Any]:
        """One iteration; its measurements.

        Raises:
            WorkerError: the worker died.
        """
        self._send("run")
        return self._receive("iteration")

    def stop(self) -> None:
        """End its input, which makes it leave."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _receive says what happened
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _receive(self, event: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            reason = " (killed: out of memory?)" if code == -signal.SIGKILL else ""
            last_words = self._log.read_text()[-LAST_WORDS:]
            raise WorkerError(f"{self.name} ended with status {code}{reason}. Its last words:\n{last_words}")
        message: dict[str, Any] = json.loads(line)
        assert message.pop("event") == event
        return message


@contextlib.contextmanager
def running(
    names: Sequence[str], shape: Shape, *, seed: int, threads: int, model: Path | None = None, **job: Any
) -> Iterator[list[WorkerProcess]]:
    """Systems that have loaded the same model and wait for work.

    Args:
        names: of the systems, keys of `SYSTEMS`.
        shape: of the work.
        seed: of weights, prompts and samples.
        threads: of torch, in each.
        model: folder of the model; default: a random one of this shape is made.
        job: more entries for every worker's job; `environment`: variables of its process.
    """
    crowded = len(names) * held_mb(shape) > available_mb() / 4
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if model is None:
            model = Path(folder) / "model"
            subprocess.run(
                [sys.executable, "-m", "benchmarks.workload", shape.to_json(), str(model), str(seed)],
                cwd=ROOT,
                check=True,
                stderr=subprocess.DEVNULL,
            )
        whole_job = {
            "shape": json.loads(shape.to_json()),
            "model": str(model),
            "seed": seed,
            "threads": threads,
            "release_memory": crowded,
            **job,
        }
        workers = []
        for name in names:
            workers.append(WorkerProcess(name, whole_job, Path(folder) / f"{name}.log"))
            stack.callback(workers[-1].stop)
        yield workers


def check_work(name: str, shape: Shape, iteration: Mapping[str, Any]) -> None:
    """Times are only comparable for equal work.

    Raises:
        WorkerError: other numbers of optimizer steps or tokens than the shape's.
    """
    done = (iteration["optimizer_steps"], iteration["response_tokens"])
    if done != (shape.optimizer_steps, shape.response_tokens):
        raise WorkerError(
            f"{name} took {done[0]} optimizer steps on {done[1]} response tokens; shape {shape.name} has "
            f"{shape.optimizer_steps} and {shape.response_tokens}"
        )
