r"""Numbers as people and LaTeX write them are read exactly; nothing is evaluated, and nothing takes long."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl4lms_like.scoring.math_answers import (
    MathEqual,
    NotANumber,
    answer_of_reference,
    answer_of_response,
    last_number,
    number,
)
from tests.texts import texts


def is_right(response: str, *references: str, **options) -> bool:
    return MathEqual(**options).per_text(texts([response], [references])) == [1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("-5", -5),
        ("−5", -5),
        ("+.5", Fraction(1, 2)),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("$1,200", 1200),
        ("3/4", Fraction(3, 4)),
        ("1 3/4", Fraction(7, 4)),
        ("2.5e-3", Fraction(1, 400)),
        ("6 \\times 10^{23}", 6 * 10**23),
        ("12.5%", Fraction(1, 8)),
        ("12.5\\%", Fraction(1, 8)),
        ("\\frac{1}{2}", Fraction(1, 2)),
        ("\\dfrac12", Fraction(1, 2)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("3\\frac{1}{2}", Fraction(7, 2)),
        ("-3\\frac{1}{2}", Fraction(-7, 2)),
        ("\\sqrt{\\frac{9}{4}}", Fraction(3, 2)),
        ("\\sqrt[3]{-27}", -3),
        ("2^{10}", 1024),
        ("-2^2", -4),
        ("8^{1/3}", 2),
        ("(1+2)(3-1)/4", Fraction(3, 2)),
        ("x = 7", 7),
        ("5\\text{ cm}", 5),
        ("5 cm", 5),
        ("90^\\circ", 90),
        ("\\left( 2 \\right)", 2),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["2\\sqrt{3}", "\\sqrt{12}", "12^{0.5}", "\\frac{6}{\\sqrt{3}}"])
def test_roots_that_are_not_exact_are_floats(text):
    assert float(number(text)) == pytest.approx(12**0.5, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    ["", "x", "1 2", "1/0", "0^{-1}", "\\sqrt{-1}", "(-1)^{0.5}", "(1", "1)", "1..2", "__import__('os')", "2**3", "5x",
     "1e9999999", "9^{9^{9^9}}", "((((" * 60 + "1" + "))))" * 60, "9" * 5000, "\\sqrt[0]{2}", "\\frac{1}", "1, 234"],
)  # fmt: skip
def test_what_is_no_number_is_none_and_takes_no_time(text):
    with pytest.raises(NotANumber):
        number(text)


def test_brackets_side_by_side_do_not_count_as_nested():
    assert number("+".join(["(1)"] * 45)) == 45
    assert number("(1)+" * 20 + "(" * 35 + "1" + ")" * 35) == 21
    with pytest.raises(NotANumber):
        number("(1)+" * 20 + "(" * 45 + "1" + ")" * 45)


@given(st.fractions(), st.sampled_from(["{}", "\\boxed{{{}}}", "So #### {}", "The answer is {}."]))
def test_every_fraction_is_equal_to_itself_however_it_is_said(value, sentence):
    assert is_right(
        sentence.format(f"{value.numerator}/{value.denominator}"), f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    )


@given(st.text(), st.text())
def test_no_text_is_too_strange(response, reference):
    assert is_right(response, reference) in (True, False)
    assert is_right(response, response) in (True, False)


@given(st.text(alphabet="0123456789.,%/-+^(){}[]\\ \\frac\\sqrt\\boxed$eE", max_size=80))
def test_no_expression_is_too_strange(text):
    assert is_right(text, "1") in (True, False)
    assert is_right(text, text) is True or answer_of_response(text) != text


def test_the_answer_is_what_is_boxed_then_what_follows_the_hashes_then_the_last_number():
    assert answer_of_response("\\boxed{1} or rather \\boxed{\\frac{2}{3}} of 7") == "\\frac{2}{3}"
    assert answer_of_response("5 + 5 = 10\n#### 10\nThat was step 3.") == "10"
    assert answer_of_response("First 3, then -4.5, that is all.") == "-4.5"
    assert answer_of_response("I do not know") is None
    assert answer_of_response("an open \\boxed{12") == "12"
    assert answer_of_reference("She has 3 apples and buys 4. The answer is 7.") == "7"
    assert answer_of_reference("x^2 + 1") == "x^2 + 1"


@pytest.mark.parametrize(
    ("text", "number"),
    [("10-5", "5"), ("10 -5", "-5"), ("it is 1/2.", "1/2"), ("50 %", "50 %"), ("1,000", "1,000"), ("v2", "2"),
     ("1,2", "2"), ("", None)],
)  # fmt: skip
def test_the_last_number_of_a_sentence(text, number):
    assert last_number(text) == number


def test_numbers_are_equal_within_the_tolerance():
    assert not is_right("0.333", "1/3") and is_right("0.3333333", "1/3")
    assert is_right("0.333", "1/3", rel_tol=0.01)
    assert not is_right("0", "1e-9") and is_right("0", "1e-9", abs_tol=1e-8)
    assert is_right("0.0", "0")


def test_a_percent_sign_is_read_as_it_fits_or_as_one_says():
    assert is_right("50%", "0.5") and is_right("50%", "50") and is_right("25", r"25\%") and not is_right("50%", "5")
    assert is_right("50%", "0.5", percent="hundredth") and not is_right("50%", "50", percent="hundredth")
    assert is_right("50%", "50", percent="ignored") and not is_right("50%", "0.5", percent="ignored")


def test_tuples_are_equal_part_by_part_and_other_answers_as_text():
    assert is_right("\\boxed{(1, 0.5)}", "(1,\\frac12)")
    assert not is_right("\\boxed{(1, 2)}", "(2, 1)") and not is_right("\\boxed{(1, 2)}", "(1, 2, 3)")
    assert not is_right("\\boxed{[1, 2)}", "(1, 2)")
    assert is_right("\\boxed{\\text{even}}", "even")
    assert is_right("\\boxed{x^2+1}", "x^2 + 1") and not is_right("\\boxed{x^2-1}", "x^2 + 1")


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("The answer is −5", "-5"),
        ("It is –5 degrees", "-5"),
        ("1.5 \\times 10^{-3}", "0.0015"),
        ("about 3 × 10^8 m/s", "300000000"),
        ("The answer is 3 1/2 cups", "3.5"),
        ("The answer is $\\frac{1}{2}$.", "0.5"),
        ("so it is $-\\dfrac{\\sqrt{3}}{2}$", "-\\frac{\\sqrt{3}}{2}"),
        ("The answer is $2\\sqrt{3}$", "\\sqrt{12}"),
        ("an area of $4\\pi$", "4\\pi"),
        ("that makes $2^{10}$", "1024"),
        ("\\boxed{\\$18.90}", "18.9"),
        ("\\boxed{€5}", "5"),
        ("\\boxed{10{,}000}", "10,000"),
        ("\\boxed{5\\mathrm{~cm}}", "5"),
        ("\\boxed{12\\text{ m}^{2}}", "12"),
        ("\\boxed{3 × 10^8}", "3e8"),
        ("\\boxed{2π}", "2\\pi"),
        ("\\boxed{x^{2}+1}", "x^2 + 1"),
        ("\\boxed{1011_2}", "1011_{2}"),
        ("\\boxed{\\pm 5}", "\\pm5"),
        ("\\boxed{\\text{(B)}}", "B"),
        ("\\boxed{x \\in [1,2]}", "[1, 2]"),
        ("\\boxed{\\{1, 2, \\frac12\\}}", "\\{0.5,2,1\\}"),
        ("\\boxed{\\{(1,2),(3,4)\\}}", "\\{(3, 4), (1, 2)\\}"),
        ("\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        ("\\boxed{\\left(-\\infty, 3\\right]}", "(-\\infty,3]"),
    ],
)
def test_an_answer_may_be_written_in_another_way(response, reference):
    assert is_right(response, reference)


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("The answer is $\\frac{3}{4}$", "4"),
        ("that makes $2^{10}$", "10"),
        ("The answer is $\\sqrt{16}$", "16"),
        ("\\frac{x}{2}", "2"),
        ("it is 3 - 5", "-5"),
        ("1,234", "1.234"),
        ("\\boxed{\\{1,2,2\\}}", "\\{1,1,2\\}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2,3\\}"),
        ("\\boxed{\\{1,2\\}}", "(1,2)"),
        ("\\boxed{5 \\text{ or } 6}", "5"),
        ("\\boxed{\\pm 5}", "5"),
        ("\\boxed{\\leftarrow}", "arrow"),
    ],
)
def test_a_part_of_an_answer_is_not_the_answer(response, reference):
    assert not is_right(response, reference)


def test_any_reference_will_do():
    assert is_right("It is 4.", "5", "4") is True
    assert is_right("", "5") is False


def test_a_pattern_of_ones_own_finds_the_answer():
    pattern = r"ANSWER: (.*)"
    assert is_right("ANSWER: 3\nANSWER: 4\nso 5", "4", extract=pattern)
    assert is_right("so 4", "4", extract=pattern) is False


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 50_000, "(" * 200_000, "9" * 300_000, "\\frac" * 50_000, "a5 " * 100_000, "#" * 300_000]
)
def test_very_long_texts_are_answered(text):
    assert is_right(text, "5") in (True, False)
    assert is_right("5", text) in (True, False)
