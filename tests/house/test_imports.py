"""Importing the library is quick, and what users subclass loads no model library."""

from __future__ import annotations

import subprocess
import sys

LIGHT = (
    "rl4lms_like",
    "rl4lms_like.algorithms.arguments",
    "rl4lms_like.benchmarking.spec",
    "rl4lms_like.cli",
    "rl4lms_like.cli.commands",
    "rl4lms_like.system.errors",
    "rl4lms_like.core.observation",
    "rl4lms_like.system.registry",
    "rl4lms_like.core.sample",
    "rl4lms_like.system.schema",
    "rl4lms_like.data_pools",
    "rl4lms_like.data_pools.base",
    "rl4lms_like.metrics",
    "rl4lms_like.metrics.base",
    "rl4lms_like.policies.arguments",
    "rl4lms_like.rewards",
    "rl4lms_like.rewards.base",
    "rl4lms_like.config.run_config",
    "rl4lms_like.post_train",
    "rl4lms_like.offline.pipeline",
)
HEAVY = ("torch", "transformers", "tokenizers", "stable_baselines3", "pandas", "datasets", "PIL")

LOADED = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if set({HEAVY!r}) & set(sys.modules):
        print(name)
        break
"""
TIMED = "import time; start = time.perf_counter(); import rl4lms_like; print(time.perf_counter() - start)"


def python(program: str, *arguments: str) -> str:
    outcome = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.strip()


def test_no_light_module_loads_a_heavy_package():
    assert python(LOADED, *LIGHT) == ""


def test_the_check_sees_a_heavy_package():
    assert python(LOADED, "json", "pandas", "csv") == "pandas"


def test_import_takes_less_than_a_second():
    quickest = min(float(python(TIMED)) for _ in range(5))
    assert quickest < 1.0


EVERY_MODULE = """
import importlib, pathlib, sys
from rl4lms_like.system.errors import MissingExtraError

root = pathlib.Path(sys.argv[1])
for path in sorted(root.joinpath("rl4lms_like").rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except MissingExtraError:
        pass
"""


def test_every_module_is_imported_without_a_warning(repository):
    command = [sys.executable, "-W", "error", "-c", EVERY_MODULE, str(repository)]
    outcome = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
