"""ARCHITECTURE.md and CONTRIBUTING.md lead a reader to files that exist and hold what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT, ROOT / "rl4lms_like")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

CHANGES = (
    "a KL estimator",
    "a critic-free baseline",
    "a data format",
    "a logged number",
    "a config rule",
    "a checkpoint field",
    "a command",
    "an engine",
)
RECIPES = ("a reward", "an algorithm", "a config key", "a data format", "a logged number")

PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+\.\w+)?|__init__\.py)`")
NAME = re.compile(r"`([A-Za-z_]\w+)`")
MOST_LINES = 270
WIDTH_OF_NAMES = 43
"""Characters of the column of names in the table of layers."""


def file_at(path: str) -> Path | None:
    """A file or folder of the repository or of the package."""
    return next((folder / path for folder in FOLDERS if (folder / path).exists()), None)


def section(page: str, heading: str) -> str:
    (text,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    return text


def rows() -> dict[str, str]:
    """Subject of a change -> the cell of what to open."""
    lines = [line for line in section(ARCHITECTURE, "To change X, open Y").splitlines() if line.startswith("| a")]
    return {cells[1].strip(): cells[2] for cells in (line.split("|") for line in lines)}


@pytest.mark.parametrize("change", CHANGES)
def test_the_table_of_changes_names_files_that_have_what_it_names(change):
    cell = rows()[change]
    files = [file_at(path) for path in PATH.findall(cell)]
    assert files and None not in files, cell
    sources = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    assert [name for name in NAME.findall(cell) if not any(re.search(rf"\b{name}\b", text) for text in sources)] == []


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_named_file_and_folder_exists(page):
    paths = [path for path in PATH.findall(page) if not path.startswith("my_project")]
    assert len(paths) > 20
    assert [path for path in paths if file_at(path) is None] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_the_files_that_change(recipe):
    text = section(CONTRIBUTING, f"Add {recipe}")
    paths = PATH.findall(text)
    assert any(path.startswith("tests/") for path in paths) and any(path.startswith("docs/") for path in paths)


def test_the_layers_are_those_that_are_checked():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    checked = [set(re.findall(r"\w+", layer)) for layer in contract["layers"] if layer != "__main__"]
    (table,) = re.findall(r"```\n(cli .*?)```", ARCHITECTURE, re.DOTALL)
    shown: list[set[str]] = []
    for line in table.splitlines():
        names = set(re.findall(r"\w+", line[:WIDTH_OF_NAMES]))
        if line.startswith(" "):
            shown[-1] |= names
        else:
            shown.append(names)
    assert shown == checked


def test_the_page_is_short_enough_to_be_read_at_once():
    assert len(ARCHITECTURE.splitlines()) <= MOST_LINES
