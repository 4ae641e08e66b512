"""Runs of a benchmark on a Ray cluster: each is one task, which starts the same process as without Ray.

    runner ──task──► [Ray worker] ──launch──► [process of the run] ──► results folder, shared by all machines
       └─ ray.cancel ──► KeyboardInterrupt ──► closes the pipe: the run saves its state and ends

Before the first task, the resources of the nodes are compared with those of one run, because Ray lets a task wait
without a message until its resources are free, and each node reads files of this machine.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rl4lms_like
from rl4lms_like.benchmarking.jobs import OUTPUT_FILE, Job, prepare_folder
from rl4lms_like.benchmarking.runner import POLL_S, end, launch
from rl4lms_like.benchmarking.spec import Benchmark
from rl4lms_like.core.disk import refuse_links
from rl4lms_like.core.errors import ConfigError, ConfigIssue
from rl4lms_like.core.import_paths import CODE_VARIABLE, code_folders
from rl4lms_like.tracking.run_folder import write_whole

CHECK_S = 120.0
"""Seconds that a node has to start a worker, which imports this library, and to read the files."""


class RayCluster:
    """Connected Ray cluster.

    Args:
        options: options of the task of one run.
        n_slots: number of runs for which the cluster has resources.
    """

    def __init__(self, options: Mapping[str, Any], n_slots: int) -> None:
        import ray

        self.n_slots = n_slots
        self._task = ray.remote(_run).options(max_retries=0, **options)  # a second try would find the first one's files

    def start(self, job: Job, threads: int) -> RayRun:
        """Start the task of a job, in a new folder or in that of the stopped run."""
        prepare_folder(job)
        folder = job.folder.absolute()
        code = {name: os.environ[name] for name in (CODE_VARIABLE,) if name in os.environ}
        return RayRun(self._task.remote(str(folder), threads, os.getcwd(), code), folder)


class RayRun:
    """Task of a run, with the methods of `runner.RunProcess`."""

    def __init__(self, task: Any, folder: Path) -> None:
        self.returncode: int | None = None
        self._task, self._folder = task, folder

    def poll(self) -> int | None:
        """Return the exit status, or None if the run has not ended; 1 if Ray lost its process."""
        import ray
        from ray.exceptions import RayError, TaskCancelledError

        if self.returncode is None and ray.wait([self._task], timeout=0)[0]:
            try:
                self.returncode = ray.get(self._task)
            except TaskCancelledError:
                self.returncode = -signal.SIGINT
            except RayError as error:  # worker or node lost, or an exception in `_run`
                self.returncode = 1
                refuse_links([self._folder / OUTPUT_FILE])
                with (self._folder / OUTPUT_FILE).open("a", encoding="utf-8") as output:
                    output.write(f"{error}\n")
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the run has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        import ray

        if not ray.wait([self._task], timeout=timeout)[0]:
            raise subprocess.TimeoutExpired("the task", timeout or 0.0)
        return self.poll()

    def ask_to_end(self) -> None:
        """Raise KeyboardInterrupt in the task, which ends the process as the runner does; a waiting task is removed."""
        import ray

        ray.cancel(self._task)

    kill = ask_to_end  # a second interrupt ends the waiting for the process, which is then killed


def _run(folder: str, threads: int, current_folder: str, code: Mapping[str, str]) -> int:
    """Run the process of a job on this node and return its exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `ray.cancel` has no effect where SIGINT is ignored
    process = launch(Path(folder), threads, current_folder, code)
    try:
        while process.poll() is None:  # `process.wait` would not be interrupted by Ray
            time.sleep(POLL_S)
    finally:
        end([process])
    return process.returncode


@contextmanager
def connected(address: str, benchmark: Benchmark, show: Callable[[str], None]) -> Iterator[RayCluster]:
    """Connect to a Ray cluster, check that it can run the benchmark, and disconnect.

    Args:
        address: as for `ray.init`: `auto`, `host:port`, or `local` for a new cluster on this machine.
        benchmark: the spec; its results folder exists.
        show: prints a message.

    Raises:
        ConfigError: there is no such cluster, no node has the resources of a run, or a node cannot read the folders.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a new cluster would send statistics to Ray's developers
    before, current_folder = signal.getsignal(signal.SIGTERM), os.getcwd()
    os.chdir(Path(rl4lms_like.__file__).parents[1])  # Ray's workers look for modules in the current folder first
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "://" not in address:
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray would try for minutes
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        raise _wrong(address, "--ray", [f"cannot connect to {address}: {error}"]) from error
    finally:
        os.chdir(current_folder)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's handler would end this process without its cleanup
    try:
        need = {"CPU": float(benchmark.spec.threads), **benchmark.spec.resources}
        nodes, n_slots = _fitting_nodes(address, need)
        _check_files(address, benchmark, nodes)
        free = ray.available_resources()
        if any(free.get(name, 0) < n for name, n in need.items()):
            free = {name: free.get(name, 0) for name in need}
            show(f"one run needs {_amounts(need)}, and {_amounts(free)} are free: the runs wait for other users")
        options = {option: need.pop(name, None) for option, name in _OPTIONS.items()}
        yield RayCluster({**options, "resources": need}, n_slots)
    finally:
        ray.shutdown()


_OPTIONS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Resources that have an option of their own in Ray."""


def _fitting_nodes(address: str, need: Mapping[str, float]) -> tuple[list[Mapping[str, Any]], int]:
    """Return the nodes that have the resources of a run, used or not, and the number of runs that fit into them.

    Raises:
        ConfigError: there is no such node.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    slots = [int(min(node["Resources"].get(name, 0) / n + 1e-6 for name, n in need.items())) for node in nodes]
    if not any(slots):
        there = Counter(_amounts({name: node["Resources"].get(name, 0) for name in need}) for node in nodes)
        texts = ", ".join(f"{count} with {amounts}" for amounts, count in there.items())
        missing = [name for name, n in need.items() if all(node["Resources"].get(name, 0) < n for node in nodes)]
        lacking = f"missing: {', '.join(missing)}" if missing else "no node has all of them"
        text = f"one run needs {_amounts(need)}; nodes of the cluster: {texts or 'none'}; {lacking}"
        raise _wrong(address, "resources", [text])
    return [node for node, n in zip(nodes, slots, strict=True) if n], sum(slots)


def _check_files(address: str, benchmark: Benchmark, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Let each node read the configs and a new file in the results folder.

    Raises:
        ConfigError: a node has other files, or cannot run this library.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    token = benchmark.results.absolute() / f"visible_{uuid.uuid4().hex}"  # a new name: folders are cached
    files = {str(path): path.read_bytes() for path in {cell.config_path.absolute() for cell in benchmark.cells}}
    folders = [os.getcwd(), *map(str, code_folders())]
    write_whole(token, token.name)
    problems = []
    try:
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        task, files = ray.remote(unreadable), {**files, str(token): token.name.encode()}
        tasks = [task.options(num_cpus=0, max_retries=0, scheduling_strategy=place) for place in places]
        answers = [task.remote(files, folders) for task in tasks]
        deadline = time.monotonic() + CHECK_S
        for node, answer in zip(nodes, answers, strict=True):
            host = node["NodeManagerHostname"]
            try:
                for path in ray.get(answer, timeout=max(0.0, deadline - time.monotonic())):
                    problems.append(f"{host} does not have the {path} of this machine; use a shared folder")
            except RayError as error:
                problems.append(f"{host} cannot run rl4lms_like, which must be installed there: {error}")
    finally:
        token.unlink()
    if problems:
        raise _wrong(address, "--ray", problems)


def unreadable(files: Mapping[str, bytes], folders: Sequence[str]) -> list[str]:
    """Return the files that have another content on this node, by their folders, and the folders that do not exist."""
    found = [f"folder {folder}" for folder in folders if not os.path.isdir(folder)]
    for path, content in files.items():
        try:
            is_same = Path(path).read_bytes() == content
        except OSError:
            is_same = False
        if not is_same:
            found.append(f"folder {Path(path).parent}")
    return list(dict.fromkeys(found))


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _wrong(address: str, path: str, messages: Sequence[str]) -> ConfigError:
    return ConfigError([ConfigIssue(path, message) for message in messages], f"the benchmark on the cluster {address}")
