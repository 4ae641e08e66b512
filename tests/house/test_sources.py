"""The sources are documented and do not name the machine that they were written on."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SLOW

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "rl4lms_like").rglob("*.py"))

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


def parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def docstrings(module: str) -> Iterator[str]:
    """The docstrings of a module, its classes and its functions."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_modules_have_docstrings():
    assert [module for module in MODULES if not ast.get_docstring(parsed(module))] == []


def test_the_first_line_of_a_module_is_a_sentence_that_says_what_it_holds():
    firsts = {module: (ast.get_docstring(parsed(module)) or "").split("\n")[0] for module in MODULES}
    assert {module: line for module, line in firsts.items() if not line.endswith(".") or len(line.split()) < 3} == {}


def test_docstrings_open_with_a_verb_or_a_noun():
    texts = [(module, text) for module in MODULES for text in docstrings(module)]
    questions = re.compile(r"(What|Which|How|Whether|Where|When|Who|Why)\b")
    assert [f"{module}: {text.splitlines()[0]}" for module, text in texts if questions.match(text)] == []


def test_public_methods_are_documented_here_or_in_a_base_class():
    names = [module.removesuffix(".py").removesuffix("/__init__") for module in MODULES]
    modules = [importlib.import_module(name.replace("/", ".")) for name in names if not name.endswith("__main__")]
    bare = [
        f"{imported.__name__}.{owner.__name__}.{name}"
        for imported in modules
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


def test_slow_tests_exist():
    for line in SLOW.read_text().splitlines():
        if not line.startswith("#"):
            file, _, name = line.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), line
