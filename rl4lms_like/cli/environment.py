"""Implementation of `rl4lms-like env`: the versions and settings that a bug report needs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

PACKAGE = "rl4lms-like"
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "NLTK_DATA", "OMP_NUM_THREADS", "RL4LMS_LIKE_HOME")


def environment() -> dict[str, str]:
    """Return versions, devices and settings, by name. Packages that are not installed are named with their extra."""
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts = {
        PACKAGE: version(PACKAGE),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "CPU threads of torch": f"{torch.get_num_threads()} of {os.cpu_count()}",
        "GPUs": ", ".join(devices) or "none",
    }
    facts |= {f"${name}": os.environ[name] for name in VARIABLES if name in os.environ}
    return facts | dict(_packages())


def _packages() -> Iterator[tuple[str, str]]:
    """The dependencies of the library, those of its extras included, each once."""
    seen: set[str] = set()
    for line in requires(PACKAGE) or ():
        requirement = Requirement(line)
        extra = str(requirement.marker).partition('extra == "')[2].rstrip('"') if requirement.marker else ""
        if requirement.name in (*seen, PACKAGE) or extra in ("dev", "docs", "all"):
            continue
        seen.add(requirement.name)
        try:
            yield requirement.name, version(requirement.name)
        except PackageNotFoundError:
            yield requirement.name, f"not installed (extra {extra!r})" if extra else "not installed"
