"""Ids for components: the table, `register`, import paths, entry points."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from rl4lms_like.config.binding import REGISTRIES
from rl4lms_like.system import registry as registry_module
from rl4lms_like.system.registry import Entry, Registry
from tests.config_errors import raises_at


class Short:
    """Prefers short answers."""

    def __init__(self, limit: int = 20) -> None:
        self.limit = limit


class Pool:
    def __init__(self, size):
        self.size = size

    @classmethod
    def prepare(cls, split, size=3):
        return cls(size)


@pytest.fixture
def rewards():
    return Registry("reward", group="tests.rewards", table={"short": Entry(Short, "short answers")})


def test_an_id_of_the_table_is_built_with_its_arguments(rewards):
    assert rewards.get("short", {"limit": 3}).limit == 3
    assert rewards.get("short").limit == 20


def test_a_registered_component_is_found_and_its_summary_is_its_docstring(rewards):
    rewards.register("shorter")(Short)
    assert rewards.resolve("shorter") is Short
    assert rewards.entry("shorter").summary == "Prefers short answers."
    assert list(rewards) == ["short", "shorter"]


def test_an_import_path_needs_no_registration(rewards):
    assert rewards.resolve("yaml:SafeLoader").__name__ == "SafeLoader"


def test_an_entry_point_of_another_package_is_an_id(monkeypatch, rewards):
    point = EntryPoint("theirs", "yaml:SafeLoader", "tests.rewards")
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [point] if group == "tests.rewards" else [])
    assert "theirs" in rewards
    assert rewards.ids() == ["short", "theirs"]
    assert rewards.resolve("theirs").__name__ == "SafeLoader"


def test_an_unknown_id_names_the_nearest_and_the_known(rewards):
    with raises_at("", mentions="'short'"):
        rewards.get("shrot")


def test_a_far_id_is_given_no_suggestion(rewards):
    assert "did you mean" not in rewards.unknown("zzzzzzz")


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("no_such_module:X", "ModuleNotFoundError"),
        ("yaml:Nothing", "AttributeError"),
        ("tests_broken_module:X", "ZeroDivisionError"),
    ],
)
def test_an_import_path_that_leads_nowhere_says_why(rewards, path, cause, tmp_path, monkeypatch):
    (tmp_path / "tests_broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RL4LMS_LIKE_CODE", str(tmp_path))
    with raises_at("", mentions=f"'{path}'") as caught:
        rewards.resolve(path)
    assert type(caught.value.__cause__).__name__ == cause


def test_a_pool_is_prepared_not_constructed():
    pools = Registry(
        "data pool", group="tests.pools", table={"p": Entry(Pool, "")}, signature_of=lambda pool: pool.prepare
    )
    assert pools.get("p", {"split": "train"}).size == 3
    assert pools.signature("p") == Pool.prepare


@pytest.mark.parametrize("path", ["tests.system.test_registry:Short", "numpy:pi"])
def test_what_is_no_pool_is_told(path):
    pools = Registry("data pool", group="tests.pools", table={}, signature_of=lambda pool: pool.prepare)
    with raises_at("", mentions=f"'{path}'"):
        pools.signature(path)


def test_what_cannot_be_called_is_no_component(rewards):
    with raises_at("", mentions="3.14"):
        rewards.signature("numpy:pi")


def test_the_signature_of_a_heavy_component_is_its_arguments_class(rewards):
    rewards._table["heavy"] = Entry("no_such_module:Heavy", "", arguments="yaml:Mark")
    assert rewards.signature("heavy").__name__ == "Mark"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_every_shipped_id_has_a_summary_and_a_component(kind):
    registry = REGISTRIES[kind]
    assert registry.ids()
    for id in registry:
        assert registry.entry(id).summary
        assert callable(registry.resolve(id))


def test_signatures_of_all_shipped_ids_load_no_torch():
    code = """
import sys
from rl4lms_like.config.binding import REGISTRIES
for registry in REGISTRIES.values():
    for id in registry:
        registry.signature(id)
print([name for name in ("torch", "transformers", "pandas", "datasets") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
