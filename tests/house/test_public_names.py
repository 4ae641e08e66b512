"""Everything public is importable from the package, and README and docs import it from there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import pytest

import rl4lms_like
from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
from rl4lms_like.config.binding import REGISTRIES
from rl4lms_like.policies import POLICIES
from tests.house.test_docs import PAGES, ROOT, blocks_of

OF_RL4LMS = "docs/coming_from_rl4lms.md"
"""Page with the imports of RL4LMs, whose names and modules stay valid."""

OWN_PACKAGES = ("rl4lms_like.testing",)
"""Packages for the tests of users, with names of their own."""

PUBLIC = set(rl4lms_like.__all__)


def imports_of(page: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import from the library in the Python blocks of a page."""
    for _, code in blocks_of(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rl4lms_like":
                for alias in node.names:
                    yield str(node.module), alias.name


IMPORTS = sorted({(page, *names) for page in PAGES if page != OF_RL4LMS for names in imports_of(page)})


def test_the_pages_import_many_names():
    assert len({name for _, _, name in IMPORTS}) > 20


@pytest.mark.parametrize(("page", "module", "name"), IMPORTS)
def test_pages_import_public_names_from_the_package(page, module, name):
    if module.startswith(OWN_PACKAGES):
        assert hasattr(importlib.import_module(module), name)
        return
    assert module == "rl4lms_like", f"{page}: write `from rl4lms_like import {name}`"
    assert name in PUBLIC, f"{name}, which {page} imports, is missing in `__all__`"


@pytest.mark.parametrize("registry", [ALGORITHMS, OBJECTIVES, POLICIES], ids=lambda registry: registry.kind)
def test_every_algorithm_objective_and_policy_is_public(registry):
    classes = {id: registry.resolve(id) for id in registry}
    assert {id for id, component in classes.items() if component.__name__ not in PUBLIC} == set()
    for component in classes.values():
        assert getattr(rl4lms_like, component.__name__) is component


def test_every_registry_is_public():
    registries = [getattr(rl4lms_like, name) for name in PUBLIC if name.isupper()]
    assert [name for name, registry in REGISTRIES.items() if registry not in registries] == []


def test_a_new_public_name_is_in_both_tables_and_in_the_part_for_type_checkers():
    tree = ast.parse((ROOT / "rl4lms_like" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == {name: f"rl4lms_like.{module}" for name, module in rl4lms_like._MODULES.items()}
    assert rl4lms_like.__all__ == sorted(PUBLIC) and declared.keys() == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_imported_and_is_explained(name):
    public = getattr(rl4lms_like, name)
    if isinstance(public, type) or callable(public):
        assert (public.__doc__ or "").strip()


def test_what_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'GRPPO'"):
        _ = rl4lms_like.GRPPO
