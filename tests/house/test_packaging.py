"""constraints.txt pins every declared dependency, within its range, for every supported Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10.13", "3.11.7", "3.12.1", "3.13.0")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared() -> list[Requirement]:
    extras = project()["optional-dependencies"].values()
    lines = [*project()["dependencies"], *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in lines if not line.startswith(project()["name"])]


def pins(python: str) -> dict[str, str]:
    """Package -> the version that constraints.txt gives it under this Python."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    chosen = [pin for pin in requirements if applies(pin, python)]
    assert len(chosen) == len({canonicalize_name(pin.name) for pin in chosen}), "a package is pinned twice"
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in chosen}


def applies(requirement: Requirement, python: str) -> bool:
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_within_its_range(python):
    pinned = pins(python)
    for requirement in declared():
        if applies(requirement, python):
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} has no pin"
            assert requirement.specifier.contains(version), f"{requirement} refuses {version}"


def test_every_extra_but_those_of_developers_is_in_all():
    extras = project()["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == set(extras) - {"all", "dev", "docs"}
