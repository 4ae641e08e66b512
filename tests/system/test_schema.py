"""Mappings held against signatures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator

from rl4lms_like.system.schema import check_arguments, check_value, join, signature_of

if TYPE_CHECKING:
    from nowhere import Nothing


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part.

    Args:
        size: how big.
    """

    size: Annotated[int, Ge(1)]
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Block(Part):
    """A block.

    Args:
        rate: how fast, in
            steps.
    """

    rate: Annotated[float, Gt(0)] = 0.5
    side: Literal["left", "right"] = "left"
    part: Part = field(default_factory=lambda: Part(size=1))
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.rate == 13:
            raise ValueError("rate 13 brings bad luck")


def messages(target, args, **kwargs):
    return [str(issue) for issue in check_arguments(target, args, "a", **kwargs)[1]]


def test_good_arguments_are_bound_and_blocks_become_objects():
    bound, issues = check_arguments(Block, {"size": 2, "part": {"size": 3}, "parts": [{"size": 4}]}, "")
    assert not issues
    assert bound == {"size": 2, "part": Part(size=3), "parts": [Part(size=4)]}


def test_every_mistake_is_found_with_its_path():
    args = {"rat": 1, "side": "up", "part": {"size": 0}, "parts": [{"size": 1}, {"sise": 1}, 5]}
    assert messages(Block, args) == [
        "a.rat: unknown key; did you mean 'rate'?",
        "a.side: expected 'left' or 'right', got 'up'",
        "a.part.size: expected a whole number of at least 1, got 0",
        "a.parts.1.sise: unknown key; did you mean 'size'?",
        "a.parts.1.size: missing; expected a whole number of at least 1",
        "a.parts.2: expected a mapping with the keys size, tags; got 5",
        "a.size: missing; expected a whole number of at least 1",
    ]


def test_a_block_that_refuses_its_values_is_a_mistake_of_the_block():
    _, issues = check_value({"size": 1, "rate": 13}, Block, "x")
    assert [str(issue) for issue in issues] == ["x: rate 13 brings bad luck"]


@dataclass(frozen=True, kw_only=True)
class Best:
    metric: str
    mode: Literal["max", "min"]


def takes_blocks(needed: Best, best: Best | None = None) -> None: ...


def test_the_keys_of_a_block_that_may_be_null_are_told_one_by_one():
    good = Best(metric="bleu", mode="max")
    assert check_value({"metric": "bleu", "mode": "max"}, Best | None, "b") == (good, [])
    assert check_value(None, Best | None, "b") == (None, [])
    assert check_value(good, Best | None, "b") == (good, []), "of a component that Python makes"
    _, issues = check_value({"metrik": "bleu", "mode": "most"}, Best | None, "b")
    assert [str(issue) for issue in issues] == [
        "b.metrik: unknown key; did you mean 'metric'?",
        "b.mode: expected 'max' or 'min', got 'most'",
        "b.metric: missing; expected text",
    ]
    _, issues = check_arguments(takes_blocks, {"best": "bleu"}, "")
    assert [str(issue) for issue in issues] == [
        "best: expected a mapping with the keys metric, mode; got 'bleu'",
        "needed: missing; expected a mapping with the keys metric, mode",
    ]


def test_an_empty_block_or_list_is_empty():
    bound, issues = check_arguments(Block, {"size": 1, "parts": None, "tags": None}, "")
    assert not issues
    assert bound["parts"] == []
    assert bound["tags"] == {}


@pytest.mark.parametrize(
    ("annotation", "value", "coerced"),
    [
        (float, "1e-6", 1e-6),
        (float, 1, 1.0),
        (int, 5.0, 5),
        (int, "7", 7),
        (bool | Literal["rollout"], "rollout", "rollout"),
        (bool | Literal["rollout"], True, True),
        (int | None, None, None),
        (Annotated[float, Interval(ge=0, le=1)], 1, 1.0),
        (list[str], ["a"], ["a"]),
        (tuple[float, ...], [1, 2], (1.0, 2.0)),
        (Any, {"x": 1}, {"x": 1}),
    ],
)
def test_values_are_coerced_to_their_type(annotation, value, coerced):
    result, issues = check_value(value, annotation, "x")
    assert not issues
    assert result == coerced
    assert type(result) is type(coerced)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (float, True, "expected a number, got true"),
        (int, 5.5, "expected a whole number, got 5.5"),
        (int, False, "expected a whole number, got false"),
        (float, float("nan"), "expected a number, got nan"),
        (Annotated[float, Gt(0)], "wide", "expected a number above 0, got 'wide'"),
        (Annotated[float, Gt(0)] | None, 0, "expected a number above 0, or null, got 0"),
        (Annotated[float, Interval(ge=0, le=1)], 2, "expected a number from 0 to 1, got 2"),
        (bool | Literal["rollout"], "all", "expected true or false, or 'rollout', got 'all'"),
        (str, 3, "expected text, got 3"),
        (str, None, "expected text, got null"),
        (dict[str, Any], [1], "expected a mapping, got [1]"),
        (list[str], "a", "expected a list, each text, got 'a'"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(annotation, value, message):
    _, issues = check_value(value, annotation, "x")
    assert [str(issue) for issue in issues] == [f"x: {message}"]


def test_a_long_value_is_shortened():
    _, issues = check_value("x" * 500, int, "p")
    assert len(issues[0].message) < 120


class Reward:
    def __init__(self, limit: int, name="a", *, other: Nothing | None = None, **rest: float) -> None: ...


def test_a_class_is_checked_by_its_constructor():
    assert messages(Reward, {"limit": "x", "name": 3, "other": 4, "anything": "goes"}) == [
        "a.limit: expected a whole number, got 'x'"
    ]
    assert messages(Reward, {}) == ["a.limit: missing; expected a whole number"]


def test_a_class_without_constructor_takes_nothing():
    class Plain:
        pass

    assert messages(Plain, {"x": 1}) == ["a.x: unknown key; nothing can be set here"]


def test_a_built_in_type_that_tells_no_signature_takes_anything():
    assert messages(dict, {"x": 1}) == []


def test_what_the_library_fills_in_cannot_be_set():
    def prepare(split: str, size: int = 3) -> None: ...

    assert messages(prepare, {"size": 1}, exclude=("split",)) == []
    assert messages(prepare, {"split": "val"}, exclude=("split",)) == [
        "a.split: is filled in by the library and cannot be set here"
    ]


def test_a_bound_method_has_its_annotations():
    class Pool:
        @classmethod
        def prepare(cls, split: str, size: int = 3) -> None: ...

    assert messages(Pool.prepare, {"size": "x"}, exclude=("split",)) == ["a.size: expected a whole number, got 'x'"]


def test_keys_that_are_no_text_are_unknown():
    assert messages(Reward, {"limit": 1, 3: 4}) == ["a.3: unknown key; known: limit, name, other"]


def test_a_signature_has_help_and_defaults_of_base_classes_too():
    arguments = {argument.name: argument for argument in signature_of(Block).arguments}
    assert arguments["size"].help == "how big."
    assert arguments["rate"].help == "how fast, in steps."
    assert arguments["size"].required
    assert arguments["tags"].default == {}
    assert signature_of(Block).defaults["part"] == Part(size=1)


TEXTS = st.text("abize1.-", max_size=5)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(["size", "tags", "rate", "side", "part", "parts", "nope"]), VALUES))
def test_whatever_is_given_either_binds_or_is_reported(args):
    bound, issues = check_arguments(Block, args, "")
    named = {issue.path.split(".")[0] for issue in issues}
    assert set(args) | {"size"} == set(bound) | named
    assert not set(bound) & named
    if not issues and bound.get("rate") != 13:
        assert Block(**bound).size >= 1


@settings(deadline=None)
@given(st.integers(1, 10**6), st.floats(1e-9, 1e9), st.sampled_from(["left", "right"]))
def test_numbers_as_text_bind_as_the_numbers(size, rate, side):
    plain, wrong = check_arguments(Block, {"size": size, "rate": rate, "side": side}, "")
    text, wrong_too = check_arguments(Block, {"size": str(size), "rate": repr(rate), "side": side}, "")
    assert not wrong
    assert not wrong_too
    assert plain == text


def test_paths_join_with_dots():
    assert join("", "alg") == "alg"
    assert join("alg", 0) == "alg.0"


def even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


def test_a_validator_in_an_annotation_says_what_is_wrong():
    assert check_value("4", Annotated[int, AfterValidator(even)], "x") == (4, [])
    _, issues = check_value([2, 3], list[Annotated[int, AfterValidator(even)]], "x")
    assert [str(issue) for issue in issues] == ["x: 3 is odd"]


def test_blocks_inside_mappings_and_lists_tell_where():
    _, issues = check_value({"a": [{"size": 1}, {"size": 0, "tag": 1}]}, dict[str, list[Part]], "x")
    assert [issue.path for issue in issues] == ["x.a.1.size", "x.a.1.tag"]
    assert check_value({"a": [{"size": 1}]}, dict[str, list[Part]], "x") == ({"a": [Part(size=1)]}, [])


def test_an_empty_key_can_be_seen():
    assert messages(Part, {"size": 1, "": 2}) == ["a.'': unknown key; known: size, tags"]
