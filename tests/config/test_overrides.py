"""`--set` PATH=VALUE."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.config.yaml_file import apply_overrides

BLOCKS = {"alg": {"args": {"gamma": 1}}, "metrics": [{"id": "a"}, {"id": "b", "args": None}], "seed": 1}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=3", ["seed"], 3),
        ("alg.args.learning_rate=1e-5", ["alg", "args", "learning_rate"], 1e-5),
        ("alg.args.gamma=", ["alg", "args", "gamma"], None),
        ("metrics.1.id=c", ["metrics", 1, "id"], "c"),
        ("metrics.1.args.size=3", ["metrics", 1, "args", "size"], 3),
        ("metrics=[{id: x}]", ["metrics"], [{"id": "x"}]),
        ("new.block.key=true", ["new", "block", "key"], True),
        ("alg.args.prompt=a = b", ["alg", "args", "prompt"], "a = b"),
        (" seed =4", ["seed"], 4),
    ],
)
def test_an_override_changes_one_place_of_a_copy(override, path, value):
    before = copy.deepcopy(BLOCKS)
    changed, issues = apply_overrides(BLOCKS, [override])
    assert not issues
    assert before == BLOCKS
    for key in path:
        changed = changed[key]
    assert changed == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set: expected PATH=VALUE as in alg.args.gamma=1, got 'seed'"),
        ("alg..args=1", "--set: expected PATH=VALUE as in alg.args.gamma=1, got 'alg..args=1'"),
        ("=1", "--set: expected PATH=VALUE as in alg.args.gamma=1, got '=1'"),
        ("seed.x=1", "--set seed.x: seed is 1, which has no keys to set"),
        ("metrics.2.id=x", "--set metrics.2.id: metrics is a list of 2; expected an index below that, got '2'"),
        ("metrics.id=x", "--set metrics.id: metrics is a list of 2; expected an index below that, got 'id'"),
        ("alg.args=[1", "--set alg.args: not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_is_a_mistake(override, message):
    changed, issues = apply_overrides(BLOCKS, [override])
    assert len(issues) == 1
    assert str(issues[0]).startswith(message)
    assert changed == BLOCKS


def test_all_impossible_overrides_are_told_and_the_others_applied():
    changed, issues = apply_overrides(BLOCKS, ["x", "seed=2", "seed.y=1"])
    assert len(issues) == 2
    assert changed["seed"] == 2


KEYS = st.text("abc", min_size=1, max_size=3)


@settings(deadline=None)
@given(st.lists(KEYS, min_size=1, max_size=4), st.integers())
def test_a_path_into_nothing_makes_the_blocks_on_the_way(keys, value):
    changed, issues = apply_overrides({}, [f"{'.'.join(keys)}={value}"])
    assert not issues
    for key in keys:
        assert list(changed) == [key]
        changed = changed[key]
    assert changed == value
