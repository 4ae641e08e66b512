"""How the sources are kept: documented, in rooms one can survey, and free of the machine they were written on."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "rl4lms_like").rglob("*.py"))
MAX_LINES = 400

MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|mnt|opt|root|tmp|Users|work)/\w")
INDEX_HOST = re.compile(r"pypi\.(?:org|python)|pythonhosted\.|download\.pytorch\.|(?:find-links|index-url)[ =]*http")


def kept_files() -> list[Path]:
    """Files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def lines_with(pattern: re.Pattern[str], files: list[Path]) -> Iterator[str]:
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_opens_with_its_model_of_the_world(module):
    assert ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_a_room_one_can_survey(module):
    assert len((ROOT / module).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__.py")])
def test_public_methods_are_documented_here_or_where_they_are_declared(module):
    imported = importlib.import_module(module.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    bare = [
        f"{owner.__name__}.{name}"
        for owner in vars(imported).values()
        if inspect.isclass(owner) and owner.__module__ == imported.__name__ and not owner.__name__.startswith("_")
        for name, member in vars(owner).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (staticmethod, classmethod, property)))
        and not inspect.getdoc(getattr(owner, name))
    ]
    assert bare == []


@pytest.mark.parametrize("pattern", [MACHINE_PATH, INDEX_HOST], ids=["machine path", "package index"])
def test_no_kept_file_names_the_machine_it_was_written_on(pattern):
    files = kept_files()
    assert Path(__file__) in files
    assert list(lines_with(pattern, files)) == []


@pytest.mark.parametrize("folder", ["home", "tmp", "work"])
def test_the_search_finds_machine_paths(tmp_path, folder):
    assert MACHINE_PATH.search(f"open('/{folder}/somebody/model')")
    assert not MACHINE_PATH.search(f"see docs/{folder}/page and ../{folder}/page and $ROOT/{folder}/page")
