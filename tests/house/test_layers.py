"""The layer table of ARCHITECTURE.md is kept by a machine, and the machine can say no."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", LINT], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    shutil.copy(repository / "pyproject.toml", tmp_path)
    package = repository / "rl4lms_like"
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_imports_point_down(repository):
    outcome = lint_imports(repository)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_an_untouched_copy_is_accepted_too(copy):
    outcome = lint_imports(copy)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_upward_imports_imports_of_siblings_and_folders_without_a_layer_are_refused(copy):
    with (copy / "rl4lms_like/system/errors.py").open("a") as module:
        module.write("\n\ndef upward():\n    from rl4lms_like.rewards import base\n\n    return base\n")
    with (copy / "rl4lms_like/metrics/base.py").open("a") as module:
        module.write("\nimport rl4lms_like.rewards.base\n")
    (copy / "rl4lms_like/helpers").mkdir()
    (copy / "rl4lms_like/helpers/__init__.py").write_text('"""A folder that no layer lists."""\n')
    outcome = lint_imports(copy)
    assert outcome.returncode != 0
    for refused in ("system.errors -> rl4lms_like.rewards.base", "metrics.base -> rl4lms_like.rewards.base", "helpers"):
        assert f"rl4lms_like.{refused}" in outcome.stdout
