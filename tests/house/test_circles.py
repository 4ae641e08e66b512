"""No module needs, by whatever way, one that needs it: also not for types alone, and not inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rl4lms_like"


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name -> file of every module; a folder goes by its own name."""
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(source: str, modules: Iterable[str]) -> Iterator[str]:
    """Modules that a source imports anywhere; a name out of a folder's `__init__` counts for the folder."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules:
                    yield name
                elif node.module in modules:
                    yield node.module


def graph_of(package: Path) -> dict[str, set[str]]:
    modules = modules_of(package)
    return {name: set(imports_of(path.read_text(encoding="utf-8"), modules)) - {name} for name, path in modules.items()}


def circle_of(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules of one circle, in the order of their imports; none if there is no circle."""
    finished: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for imported in sorted(graph[module]):
            if circle := search(imported, [*path, module]):
                return circle
        finished.add(module)
        return []

    for module in sorted(graph):
        if circle := search(module, []):
            return circle
    return []


def test_no_module_imports_itself_by_way_of_others():
    assert " -> ".join(circle_of(graph_of(PACKAGE))) == ""


@pytest.mark.parametrize(
    "second",
    [
        "from package.first import A\n",
        "import package.first\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import first\n",
        "def f():\n    from package.first import A\n",
    ],
)
def test_the_search_finds_a_circle(tmp_path, second):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("from package import second\n\nA = 1\n")
    (package / "second.py").write_text("from package import third\n" + second)
    (package / "third.py").write_text("")
    assert circle_of(graph_of(package)) == ["package.first", "package.second", "package.first"]
