"""Modules and files that registries, pages and settings name as texts exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from rl4lms_like.config.binding import REGISTRIES
from rl4lms_like.system.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]
PAGES += [ROOT / "benchmarks/README.md", ROOT / "tests/robustness/README.md"]
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # its older entries name what was there

DOTTED = re.compile(r"(?<![\w./-])(rl4lms_like(?:\.[A-Za-z]\w*)+)(?::([A-Za-z]\w*))?")
FILE = re.compile(r"`((?:\w+/)+\w+\.py)`")
GROUPS = {registry.group for registry in REGISTRIES.values()}
"""Groups of entry points, which have the form of a module's name."""


def exists(dotted: str, name: str | None = None) -> bool:
    """Return True for a module, or for an attribute of one."""
    parts, attributes = dotted.split("."), [name] if name else []
    while parts:
        try:
            found = importlib.import_module(".".join(parts))
            break
        except ModuleNotFoundError as error:
            if error.name not in (".".join(parts), ".".join(parts[:-1])):
                raise
            attributes.insert(0, parts.pop())
    for attribute in attributes:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    named = {match.groups() for match in DOTTED.finditer(text) if match[1] not in GROUPS}
    assert [f"{dotted}:{name}" for dotted, name in sorted(named, key=str) if not exists(dotted, name)] == []
    files = {file for file in FILE.findall(text) if not file.startswith("my_project/")}
    folders = (ROOT, ROOT / "rl4lms_like")
    assert [file for file in sorted(files) if not any((folder / file).is_file() for folder in folders)] == []


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_targets_of_a_registry_exist(kind):
    registry = REGISTRIES[kind]
    for id in registry:
        for target in (registry.entry(id).target, registry.entry(id).arguments):
            if isinstance(target, str) and target.startswith("rl4lms_like."):
                module, _, name = target.partition(":")
                try:
                    assert exists(module, name), f"{id}: {target}"
                except MissingExtraError:
                    assert registry.entry(id).needs, id


def test_the_search_tells_what_exists():
    assert exists("rl4lms_like.system.errors") and exists("rl4lms_like.system.errors", "ConfigError")
    assert exists("rl4lms_like.system.errors.ConfigError.path_of") is False
    assert not exists("rl4lms_like.no_such_module") and not exists("rl4lms_like.system.errors", "NoSuchError")
