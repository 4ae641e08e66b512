"""A virtual environment per foreign system, made from the package registry on first use and kept.

    benchmarks/.envs/trl-ppo     TRL 1.12
    benchmarks/.envs/trl-grpo    TRL 1.16
    benchmarks/.envs/vllm        vLLM for processors, with its own torch

TRL gets the torch and transformers of the environment that runs the benchmark, so that libraries are compared, not
versions of torch.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

ENVIRONMENTS = Path(__file__).parent / ".envs"
RECEIPT = "requirements.json"


def same_version(package: str) -> str:
    """The requirement that pins `package` to the version installed here, without a local part such as `+cpu`."""
    return f"{package}=={version(package).split('+')[0]}"


def is_installed(requirement: str) -> bool:
    """Return whether this interpreter has what a requirement asks for."""
    wanted = Requirement(requirement)
    try:
        return version(wanted.name) in wanted.specifier
    except PackageNotFoundError:
        return False


def python_of(
    name: str, requirements: tuple[str, ...], *, own_torch: bool = False, without: tuple[str, ...] = ()
) -> str:
    """The interpreter of an environment that holds `requirements`, which is made if it is not there.

    Args:
        name: of its folder.
        requirements: for pip; torch and transformers are added. If all are installed here, this interpreter is
            returned.
        own_torch: install the torch and transformers that the requirements ask for.
        without: packages to remove afterwards.

    Raises:
        subprocess.CalledProcessError: venv or pip failed; what they said is on the screen.
    """
    if all(map(is_installed, requirements)):
        return sys.executable
    wanted = [*requirements, *(() if own_torch else map(same_version, ("torch", "transformers")))]
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    receipt = folder / RECEIPT
    if receipt.exists() and json.loads(receipt.read_text()) == wanted:
        return str(python)
    print(f"making {name}'s environment: {', '.join(wanted)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    if without:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *without], check=True)
    receipt.write_text(json.dumps(wanted))
    return str(python)
