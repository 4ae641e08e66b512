"""Reproducibility: deterministic torch operations, and a record of what the numbers of a run depend on.

    deterministic: true     operations without a deterministic implementation are an error; no cuDNN benchmarking
    environment.json        software versions, processor and threads of a run; one entry for each change

On the CPUs of one machine, runs are bitwise reproducible without the key too; docs/reproducibility.md lists the limits.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rl4lms_like.core.errors import ConfigError, ConfigIssue, RL4LMsLikeError

PACKAGES = ("rl4lms-like", "torch", "transformers", "tokenizers", "stable-baselines3", "numpy", "peft", "datasets")
"""Packages whose versions may change a run's numbers."""

_VARIABLE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
"""cuBLAS reads this variable when it starts; either value makes its results deterministic."""

_NO_SUCH_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_operations(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside the block if `wanted`; restore all settings of torch on exit.

    They include the number of threads: a run may set it, and the next run may need torch's default.

    Raises:
        ConfigError: CUDA has started already, with a setting that is not deterministic.
        RL4LMsLikeError: an operation has no deterministic implementation.
    """
    import torch

    n_threads = torch.get_num_threads()
    if not wanted:
        try:
            yield
        finally:
            torch.set_num_threads(n_threads)
        return
    workspace = os.environ.get(_VARIABLE)
    if torch.cuda.is_initialized() and workspace not in _WORKSPACES:
        message = f"CUDA has started already: set {_VARIABLE}={_WORKSPACES[0]} before anything uses CUDA"
        raise ConfigError([ConfigIssue("deterministic", message)])
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if workspace not in _WORKSPACES:
        os.environ[_VARIABLE] = _WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except Exception as error:
        if (operation := _without_such_form(error)) is None:
            raise
        raise RL4LMsLikeError(
            f"deterministic: true, but {operation} has no deterministic implementation on this device: set "
            f"deterministic to false, or avoid the operation (attn_implementation, device, the component that uses it)"
            f"\n{error}"
        ) from error
    finally:
        torch.set_num_threads(n_threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = workspace


def environment(device: Any) -> dict[str, Any]:
    """Return what a run's numbers depend on besides its config, without paths or names of machines and users.

    Args:
        device: torch device of the model.
    """
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "random") if sys.flags.hash_randomization else "0",
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    return found


def _without_such_form(error: BaseException) -> str | None:
    """Return the operation whose missing deterministic implementation caused an error; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, RuntimeError) and (found := _NO_SUCH_FORM.search(text)):
            return found[1]
        if isinstance(cause, RuntimeError) and _VARIABLE in text:
            return "cuBLAS"
        cause = cause.__cause__
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
