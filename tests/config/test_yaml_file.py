"""Reading YAML: floats without a dot, repeated keys, files that are none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.config.yaml_file import dump_yaml, parse_value, parse_yaml, read_yaml
from tests.config_errors import raises_at


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2E3", -2000.0),
        ("1.e+2", 100.0),
        (".5e1", 5.0),
        ("1e", "1e"),
        ("e5", "e5"),
        ("'1e-6'", "1e-6"),
        ("12", 12),
        ("1.5", 1.5),
        ("[1e-5, true]", [1e-5, True]),
        ("{a: null}", {"a": None}),
        ("1e5x", "1e5x"),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    result = parse_value(text)
    assert result == value
    assert type(result) is type(value)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_that_python_writes_is_read_back(number):
    assert parse_value(repr(number)) == number


def test_all_repeated_keys_are_found_with_path_and_lines():
    text = "alg:\n  args:\n    gamma: 1\n    gamma: 0.9\nitems:\n- {a: 1, a: 2}\nalg: 3\n"
    _, repeated = parse_yaml(text, "f.yml")
    found = {(issue.path, *map(int, re.findall(r"\d+", issue.message))) for issue in repeated}
    assert found == {("alg.args.gamma", 3, 4), ("items.0.a", 6, 6), ("alg", 1, 7)}


def test_anchors_and_merges_work_and_are_no_repetition():
    mapping, repeated = parse_yaml("a: &x {b: 1, c: 2}\nd:\n  <<: *x\n  b: 3\n", "f.yml")
    assert mapping["d"] == {"b": 3, "c": 2}
    assert not repeated


@pytest.mark.parametrize(
    ("text", "datum"),
    [
        ("a: [1, 2\nb: 3", "line 2"),
        ("a: !!python/object/apply:os.getcwd []", "python/object/apply"),
        ("a: 1\n---\nb: 2", "line 2"),
        ("- 1\n- 2", "tokenizer"),
        ("", "null"),
        ("a: 1\n\tb: 2", "line 2"),
        ("? [x]\n: 1", "line 1"),
    ],
)
def test_what_is_no_config_is_a_config_error(text, datum):
    with raises_at("", mentions=datum):
        parse_yaml(text, "f.yml")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("010", "'010' .* 8"),
        ("1:30", "'1:30' .* 60"),
        ("-1:30.5", "'-1:30.5' .* 60"),
        (":".join("1" * 100_000), "60"),
    ],
    ids=("eights", "sixties", "negative", "long"),
)
def test_a_number_that_yaml_reads_as_another_one_is_refused(text, data):
    _, issues = parse_yaml(f"a: 0\nb:\n- {text}\n- c: 1\n  c: 2\n? {text}\n: 0\n", "f.yml")
    assert [issue.path for issue in issues] == ["b.0", "b.1.c", text]
    assert re.search(data, issues[0].message)
    with pytest.raises(ValueError, match=data):
        parse_value(text)
    assert parse_value(f"'{text}'") == text
    assert parse_value("[0, -0, 0.5, 07.5, 0x1F, 2022-10-04]")[:5] == [0, 0, 0.5, 7.5, 31]


LAUGHS = "a: [&l0 [x], " + ", ".join(f"&l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 9)) + "]"


@pytest.mark.parametrize(
    ("text", "datum"),
    [
        ("a: &loop {b: [*loop]}", "line 1, column 11: "),
        ("a: " + "[" * 60 + "]" * 60, " 50 "),
        ("a: " + "[" * 5000 + "]" * 5000, ""),
        (LAUGHS, " 20,000 "),
        ("a: \x00", "character"),
        ("a: !!int ''", ""),
        ("a: !!bool x", "'x'"),
        ("a: !!timestamp x", ""),
        ("a: 2022-13-45", "month"),
    ],
    ids=("loop", "deep", "very_deep", "laughs", "nul", "int", "bool", "timestamp", "date"),
)
def test_what_no_config_could_hold_is_a_mistake_in_files_and_overrides(text, datum):
    with raises_at("", mentions=datum):
        parse_yaml(text, "f.yml")
    with pytest.raises(ValueError):
        parse_value(f"{{{text}}}")


def test_a_key_given_twice_in_an_override_is_a_mistake():
    with pytest.raises(ValueError):
        parse_value("{a: 1, a: 2}")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    binary = tmp_path / "b.yml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path / "none.yml", tmp_path, binary):
        with raises_at("") as caught:
            read_yaml(path)
        assert str(path) in str(caught.value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab :#1e-'\n", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), PLAIN, max_size=4))
def test_what_is_written_is_read_back(mapping):
    assert parse_yaml(dump_yaml(mapping), "f.yml") == (mapping, [])
