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
from rl4lms_like.benchmarking.processes import POLL_S, end, launch
from rl4lms_like.benchmarking.spec import Benchmark
from rl4lms_like.system.disk import refuse_links
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.import_paths import CODE_VARIABLE, code_folders
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
        # No second try by Ray, which would find the files of the first one: a stopped run is resumed by the next start.
        self._task = ray.remote(_run).options(max_retries=0, **options)

    def start(self, job: Job, threads: int) -> RayRun:
        """Start the task of a job, in a new folder or in that of the stopped run."""
        prepare_folder(job)
        folder = job.folder.absolute()

        # A worker on another node has neither the current folder nor the environment of this process.
        variables = {}
        if CODE_VARIABLE in os.environ:
            variables[CODE_VARIABLE] = os.environ[CODE_VARIABLE]
        return RayRun(self._task.remote(str(folder), threads, os.getcwd(), variables), folder)


class RayRun:
    """Task of a run, with the methods of `processes.RunProcess`."""

    def __init__(self, task: Any, folder: Path) -> None:
        self.returncode: int | None = None
        self._task = task
        self._folder = folder

    def poll(self) -> int | None:
        """Return the exit status, or None if the run has not ended; 1 if Ray lost its process."""
        import ray
        from ray.exceptions import RayError, TaskCancelledError

        if self.returncode is None and ray.wait([self._task], timeout=0)[0]:
            try:
                self.returncode = ray.get(self._task)
            except TaskCancelledError:
                self.returncode = -signal.SIGINT
            except RayError as error:
                # Worker or node lost, or an exception in `_run`: the process cannot report it, so it is added to its
                # output, whose last lines the runner shows.
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


def _run(folder: str, threads: int, current_folder: str, variables: Mapping[str, str]) -> int:
    """Run the process of a job on this node and return its exit status."""
    # `ray.cancel` raises KeyboardInterrupt here, but has no effect where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = launch(Path(folder), threads, current_folder, variables)

    # In short waits: Ray would not interrupt `process.wait`. After a cancellation the process saves its state.
    try:
        while process.poll() is None:
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

    # What Ray would change: statistics that a new cluster sends to its developers, and a handler of SIGTERM that ends
    # this process without its cleanup. Its workers look for modules in the folder that is current when it starts, so
    # that is the library's, not the user's with files such as `datasets.py`.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    current_folder = os.getcwd()
    os.chdir(Path(rl4lms_like.__file__).parents[1])
    try:
        # Ray would try for minutes to reach a host that does not answer.
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "://" not in address:
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as error:
        raise _cluster_error(address, "--ray", [f"cannot connect to {address}: {error}"]) from error
    finally:
        os.chdir(current_folder)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm_handler)

    try:
        # Checked before the first task: Ray lets a task wait forever for resources that no node has.
        need = {"CPU": float(benchmark.spec.threads), **benchmark.spec.resources}
        nodes, n_slots = _fitting_nodes(address, need)
        _check_files(address, benchmark, nodes)

        # Enough on some node, but in use: the runs wait, which is worth a message.
        free = ray.available_resources()
        if any(free.get(name, 0) < amount for name, amount in need.items()):
            free = {name: free.get(name, 0) for name in need}
            show(f"one run needs {_amounts(need)}, and {_amounts(free)} are free: the runs wait for other users")

        # Ray refuses CPU, GPU and memory among the other resources; each of them is an option.
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

    # Runs on a node: as many as the scarcest resource allows. The summand is for fractions such as 3 x 1/3 of a GPU.
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fitting = []
    n_slots = 0
    for node in nodes:
        n_runs = int(min(node["Resources"].get(name, 0) / amount + 1e-6 for name, amount in need.items()))
        n_slots += n_runs
        if n_runs:
            fitting.append(node)
    if fitting:
        return fitting, n_slots

    raise _cluster_error(address, "resources", [_lacking_resources(nodes, need)])


def _lacking_resources(nodes: Sequence[Mapping[str, Any]], need: Mapping[str, float]) -> str:
    """Return the message if no node has the resources of a run: what nodes have, and what all of them lack."""
    amounts_of_nodes: Counter[str] = Counter()
    for node in nodes:
        amounts_of_nodes[_amounts({name: node["Resources"].get(name, 0) for name in need})] += 1
    descriptions = ", ".join(f"{count} with {amounts}" for amounts, count in amounts_of_nodes.items())

    # Nothing may be missing everywhere: one node has the GPUs, another one the memory.
    missing = []
    for name, amount in need.items():
        if all(node["Resources"].get(name, 0) < amount for node in nodes):
            missing.append(name)
    lacking = f"missing: {', '.join(missing)}" if missing else "no node has all of them"
    return f"one run needs {_amounts(need)}; nodes of the cluster: {descriptions or 'none'}; {lacking}"


def _check_files(address: str, benchmark: Benchmark, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Let each node read the configs and a new file in the results folder.

    Raises:
        ConfigError: a node has other files, or cannot run this library.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Path -> content. The token shows that the results folder is the same one and not of the same name; its own name is
    # new each time, because network file systems cache folders.
    token = benchmark.results.absolute() / f"visible_{uuid.uuid4().hex}"
    config_paths = {cell.config_path.absolute() for cell in benchmark.cells}
    files = {str(path): path.read_bytes() for path in config_paths}
    files[str(token)] = token.name.encode()
    folders = [os.getcwd(), *map(str, code_folders())]
    write_whole(token, token.name)

    problems = []
    try:
        # One task on each node, all at once. They reserve no CPU, or they would wait for other users' tasks.
        task = ray.remote(unreadable)
        answers = []
        for node in nodes:
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
            answers.append(options.remote(files, folders))

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
        raise _cluster_error(address, "--ray", problems)


def unreadable(files: Mapping[str, bytes], folders: Sequence[str]) -> list[str]:
    """Return the files that have another content on this node, by their folders, and the folders that do not exist."""
    missing = [f"folder {folder}" for folder in folders if not os.path.isdir(folder)]
    for path, content in files.items():
        try:
            is_same = Path(path).read_bytes() == content
        except OSError:
            is_same = False
        if not is_same:
            missing.append(f"folder {Path(path).parent}")
    return list(dict.fromkeys(missing))  # each once: all configs are often in one folder


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())


def _cluster_error(address: str, path: str, messages: Sequence[str]) -> ConfigError:
    return ConfigError([ConfigIssue(path, message) for message in messages], f"the benchmark on the cluster {address}")
