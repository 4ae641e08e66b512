"""RL4LMs' two toy scores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl4lms_like.scoring.synthetic import has_date, increasing_numbers


@pytest.mark.parametrize(
    ("text", "min_tokens", "score"),
    [
        ("1 2 3 4", 4, 1.0),
        ("1 2 3 4", 16, 4 / 8),  # as if it had half of min_tokens
        ("1 2 2 3", 4, 2 / 4),  # stops at the first that is not larger
        ("5 4 6 7", 4, 1 / 4),
        ("one 1 two 2 three 3", 2, 3 / 6),  # words in between count as tokens and do not stop the run
        ("-3 -2.5 1e2", 2, 1.0),
        ("no numbers here", 2, 0.0),
        ("", 2, 0.0),
        ("1, 2, 3,", 2, 0.0),  # a comma makes a word of a number
    ],
)
def test_increasing_numbers(text, min_tokens, score):
    assert increasing_numbers(text, min_tokens) == pytest.approx(score)


@pytest.mark.parametrize("token", ["nan", "inf", "-inf", "Infinity", "1e999"])
def test_what_is_not_finite_is_a_word(token):
    assert increasing_numbers(token, 2) == 0.0
    assert increasing_numbers(f"1 {token} 2", 2) == pytest.approx(2 / 3)


@given(st.text(), st.integers(0, 50))
def test_increasing_numbers_are_a_share(text, min_tokens):
    assert 0 <= increasing_numbers(text, min_tokens) <= 1


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=30), st.integers(0, 20))
def test_increasing_numbers_equal_rl4lms_reading(numbers, min_tokens):
    run = next((place for place in range(1, len(numbers)) if numbers[place] <= numbers[place - 1]), len(numbers))
    expected = run / max(len(numbers), min_tokens / 2)
    assert increasing_numbers(" ".join(map(str, numbers)), min_tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "score"),
    [("on 2022-10-04.", 1.0), ("12022-10-041", 1.0), ("2022-1-04", 0.0), ("2022/10/04", 0.0), ("", 0.0)],
)
def test_dates(text, score):
    assert has_date(text) == score
