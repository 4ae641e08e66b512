"""Print the versions and settings that a bug report needs."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

SUMMARY = "print the versions and settings that a bug report needs"

PACKAGE = "rl4lms-like"

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "NLTK_DATA", "OMP_NUM_THREADS", "RL4LMS_LIKE_HOME")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(options: argparse.Namespace) -> None:
    """Print versions, devices and settings. Packages that are not installed are named with their extra."""
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
    facts |= dict(_packages())
    for name, value in facts.items():
        print(f"{name}: {value}")


def _packages() -> Iterator[tuple[str, str]]:
    """Yield the dependencies of the library, including those of its extras, each with its version, once."""
    from packaging.requirements import Requirement

    seen = {PACKAGE}
    for requirement in map(Requirement, requires(PACKAGE) or ()):
        # A requirement of an extra has a marker such as `extra == "semantic"`. `all` repeats those of the others.
        extra = str(requirement.marker or "").partition('extra == "')[2].rstrip('"')
        if requirement.name in seen or extra in ("dev", "docs", "all"):
            continue

        seen.add(requirement.name)
        try:
            yield requirement.name, version(requirement.name)
        except PackageNotFoundError:
            yield requirement.name, f"not installed (extra {extra!r})" if extra else "not installed"
