"""Exact matches under SQuAD's normalisation, extraction, patterns, pass@k, lengths and repetitions."""

from __future__ import annotations

import itertools
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl4lms_like.metrics.answers import groups_of, pass_at_k
from rl4lms_like.rewards.lengths import LengthPenalty, RepetitionPenalty, SoftOverlong
from rl4lms_like.scoring.answers import ExactMatch, Regex
from tests.texts import texts

SQUAD = ExactMatch(ignore_case=True, ignore_punctuation=True, ignore_articles=True)


def exact_matches(responses, references, how):
    return how.per_text(texts(responses, references))


def repetition_penalty(text, **options):
    (value,) = RepetitionPenalty(**options).per_text(texts([text]))
    return value


def squad(text: str) -> str:
    """SQuAD's own order: lower case, punctuation, articles, white space."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@given(st.text(alphabet="aTh e,n.A\n'é四", max_size=40))
def test_the_three_together_are_squads_normalisation(text):
    assert SQUAD.normalised(text) == squad(text)


def test_what_makes_no_difference_is_chosen():
    assert exact_matches(["The  Cat! "], [["The Cat!"]], ExactMatch()) == [True]
    assert exact_matches(["the cat!"], [["The Cat!"]], ExactMatch()) == [False]
    assert exact_matches(["a cat"], [["The Cat!"]], SQUAD) == [True]
    assert exact_matches(["x  y"], [["x y"]], ExactMatch(ignore_whitespace=False)) == [False]


def test_any_reference_will_do():
    assert exact_matches(["b", ""], [["a", "b"], [""]], ExactMatch()) == [True, True]


def test_the_answer_is_extracted_from_both_sides():
    how = ExactMatch(extract=r"####\s*(.+)")
    responses = ["so #### 1\n#### 42", "42", "#### 41"]
    assert exact_matches(responses, [["6 * 7 = 42\n#### 42"]] * 3, how) == [True, False, False]
    assert exact_matches(["#### 42"], [["42"]], how) == [True]
    assert exact_matches(["yes or no"], [["no"]], ExactMatch(extract="(yes)|(no)")) == [True]


@pytest.mark.parametrize("pattern", [".*", r"\w*$", r"(\d*)"])
def test_a_match_of_nothing_behind_the_answer_is_not_the_answer(pattern):
    how = ExactMatch(extract=pattern)
    assert exact_matches(["41", "42", ""], [["42"]] * 3, how) == [False, True, False]


def test_what_costs_nothing_is_not_minus_zero():
    free = [
        LengthPenalty(5, penalty=0.1).of_length(3),
        repetition_penalty("a b", ngram_size=1, max_penalty=-1.0),
    ]
    assert [str(value) for value in free] == ["0.0", "0.0"]


def test_a_pattern_fits_anywhere_at_the_start_or_the_whole():
    def matches(responses, pattern, **options):
        return Regex(pattern, **options).per_text(texts(responses))

    responses = ["abc", "xabc", "abcx", ""]
    assert matches(responses, "abc") == [True, True, True, False]
    assert matches(responses, "abc", match="match") == [True, False, True, False]
    assert matches(responses, "abc", match="fullmatch") == [True, False, False, False]
    assert matches(responses, "abc", invert=True) == [False, False, False, True]
    assert matches(["ABC"], "abc", flags=["ignorecase", "dotall"]) == [True]
    assert matches(["no", "yes"], "(?P<yes>yes)|no", group="yes") == [False, True]


def test_what_is_no_pattern_or_group_is_refused():
    with pytest.raises(ValueError):
        Regex("(")
    with pytest.raises(ValueError):
        Regex("(?P<word>a)", 2)
    with pytest.raises(ValueError):
        Regex("a", "x")


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(n, c, k):
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples():
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)
    assert groups_of(["a", "b", "a"]) == {"a": [0, 2], "b": [1]}


@pytest.mark.parametrize(("length", "value"), [(0, 0), (5, 0), (6, -0.1), (9, -0.4), (99, -1.0)])
def test_a_length_costs_from_its_limit_on(length, value):
    assert LengthPenalty(5, penalty=0.1).of_length(length) == pytest.approx(value)


@pytest.mark.parametrize(
    ("length", "value"), [(0, 0), (12, 0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1), (17, -1)]
)
def test_soft_overlong_is_daposs_line(length, value):
    assert SoftOverlong(16, cache=4).of_length(length) == value


@pytest.mark.parametrize(
    ("text", "size", "value"),
    [("", 2, 0), ("one", 2, 0), ("a b", 2, 0), ("a b a b", 2, -1 / 3), ("A b a B", 2, -1 / 3),
     ("x x x x x", 1, -0.8), ("四 四 四", 1, -2 / 3)],
)  # fmt: skip
def test_repeated_n_grams_cost_their_share(text, size, value):
    assert repetition_penalty(text, ngram_size=size, max_penalty=-1.0) == pytest.approx(value)
