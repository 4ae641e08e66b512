r"""Comparison of mathematical answers: the final answer of a text as an exact fraction, never evaluated as code.

    "... so \boxed{\frac{1}{2}} apples"  ->  \frac{1}{2}  ->  1/2
    "#### 1,234.50"                      ->  1,234.50     ->  2469/2
    "The answer is 3.5e2 %"              ->  3.5e2 %      ->  7/2

Answers that are not numbers are compared as text without white space. `(1, 2)`, `[0, 1)` and `\{1, 2\}` are compared
part by part, sets in any order.

Numbers are read by this grammar

    sum      := product (("+" | "-") product)*
    product  := power (("*" | "/" | \times | \cdot | \div | nothing) power)*
    power    := ("+" | "-")* atom "%"* ("^" power)?
    atom     := number | integer fraction | "(" sum ")" | \frac{sum}{sum} | \sqrt[sum]{sum} | \pi

A fraction after an integer is added, not multiplied: 3\frac{1}{2} and 1 3/4 are mixed numbers. Time and memory are
bounded: expressions that are too large or nested too deeply are not numbers. Inexact roots and powers are floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Literal

from rl4lms_like.scoring.answers import compiled, extracted
from rl4lms_like.scoring.score import Score, Texts
from rl4lms_like.system.numbers import NonNegative

MAX_BITS = 4096  # maximum number of bits of a numerator or denominator
MAX_DEPTH = 40  # maximum depth of nested brackets
Percent = Literal["hundredth", "ignored"]  # meaning of a percent sign: division by 100, or nothing
Percents = Literal["either", "hundredth", "ignored"]
"""As `Percent`; `either`: whichever makes two answers equal, as in graders of MATH and GSM8K."""

NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,6}(?![\d.]))?"
"""Regular expression of a number: digits, thousands separators, a decimal point, an exponent."""

_TOKEN = re.compile(rf"\s*(?:{NUMBER}|\\[a-zA-Z]+|\\?%|[-+*/^(){{}}\[\]])", re.ASCII)
MAX_LETTERS = 300  # maximum number of characters of an answer that is parsed; longer answers are compared as text
_PLAIN_NUMBER = rf"(?:\d+\s+\d+/\d+(?![\d.])|(?:{NUMBER})(?:\s*/\s*\d+(?:\.\d+)?)?)"
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_LATEX = (
    rf"(?:(?:{NUMBER})\s*(?:\\times|\\cdot|[x*×·])\s*)?(?:{NUMBER})\s*\^\s*(?:{_BRACES}|[-\u2212]?\d+)"
    rf"|(?:(?:{NUMBER})\s*)?\\(?:[dt]?frac\s*(?:{_BRACES}|\d)\s*(?:{_BRACES}|\d)|sqrt\s*(?:\[\d+\])?\s*(?:{_BRACES}|\d))"
    rf"(?:\s*\\pi\b)?|(?:{NUMBER})\s*(?:\\pi\b|π)"
)
_LAST_NUMBER = re.compile(
    rf"(?<![\w.])[-+\u2212\u2013]?\\?[$€£¥]?(?:{_LATEX}|{_PLAIN_NUMBER})(?:\s*\\?%)?|(?:{_LATEX}|{NUMBER})(?:\s*\\?%)?",
    re.ASCII,
)
_BEHIND = 60  # characters after the last digit that may belong to its number: closing braces, a percent sign
_DRESSING = re.compile(
    r"(?<!\\)\\(?:(?:left|right|displaystyle|quad|qquad|degree)(?![A-Za-z])|[!,;: ])"
    r"|\\?[$€£¥]|~|°|\^\s*(?:\{\s*)?\\circ(?:\s*\})?"
)
_SPELLINGS = {
    "\u2212": "-", "\u2013": "-", "×": "\\times ", "·": "\\cdot ", "π": "\\pi ", "\u00a0": " ", "{,}": ",",
    "\\dfrac": "\\frac", "\\tfrac": "\\frac",
}  # fmt: skip
_ONE_LETTER = re.compile(r"([\^_])\{(\w)\}")
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_NAMED = re.compile(r"[A-Za-z](?:=|\\in(?![A-Za-z]))")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|mathbf)\s*\{([^{}]*)\}")
_TEXT_UNIT = re.compile(r"(?<=[\d)}%])(?:\s|\\,|~)*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^(?:\d|\{\d\}))?\s*$")
_UNIT = re.compile(r"(?<=[\d)}%])\s*(?:[A-Za-z]{2}[A-Za-z.\s]*(?:\^\{?\d\}?)?)$")
_WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\b")


@dataclass(eq=False)
class MathEqual(Score):
    r"""1 for each response whose final number or LaTeX answer equals that of a reference, else 0.

    References are answers alone, or whole solutions.

    Args:
        rel_tol: numbers are equal if they differ by at most this fraction of the larger one.
        abs_tol: numbers are also equal if they differ by at most this.
        percent: read 50% as 0.5 (`hundredth`), as 50 (`ignored`), or as whichever makes the answers equal (`either`).
        extract: regular expression that finds the answer instead: the first group of its last match.
    """

    needs_references = True

    rel_tol: NonNegative = 1e-6
    abs_tol: NonNegative = 0.0
    percent: Percents = "either"
    extract: str | None = None

    def __post_init__(self) -> None:
        self._extract = None if self.extract is None else compiled(self.extract)

    def per_text(self, texts: Texts) -> list[float]:
        tolerance = (Fraction(self.rel_tol), Fraction(self.abs_tol))
        readings: tuple[Percent, ...] = ("hundredth", "ignored") if self.percent == "either" else (self.percent,)

        @cache  # samples of one prompt share their references
        def expected_answer(reference: str) -> tuple[str, bool]:
            answer = answer_of_reference(reference, self._extract)
            is_numeric = _value(answer, readings[0]) is not None
            return answer, is_numeric

        # The reference comes first: it decides whether the last number of an unmarked response is its answer.
        def is_right(response: str, reference: str) -> bool:
            expected, is_numeric = expected_answer(reference)
            answer = answer_of_response(response, self._extract, numeric=is_numeric)
            return answer is not None and any(equal(answer, expected, tolerance, reading) for reading in readings)

        scores = []
        for response, references in zip(texts.responses, texts.references, strict=True):
            scores.append(float(any(is_right(response, reference) for reference in references)))
        return scores

    def answers(self, texts: Texts) -> list[str | None]:
        """Return the answer of each response in a form in which equal answers are equal texts; None without one.

        Numbers are exact fractions. 50% is 50 with `percent: ignored`, else 1/2. Other answers are texts without white
        space. The first reference decides whether an answer is a number.
        """
        # One form cannot stand for both readings of a percent sign: `either` is read as a hundredth.
        reading: Percent = "ignored" if self.percent == "ignored" else "hundredth"

        @cache
        def is_numeric(reference: str) -> bool:
            return _value(answer_of_reference(reference, self._extract), reading) is not None

        answers = []
        for response, references in zip(texts.responses, texts.references, strict=True):
            answer = answer_of_response(response, self._extract, numeric=is_numeric(references[0]))
            answers.append(None if answer is None else _uniform(answer, reading))
        return answers


def answer_of_response(text: str, extract: re.Pattern[str] | None = None, *, numeric: bool = True) -> str | None:
    """Return the answer of a response, or None if it has none.

    If the expected answer is `numeric`, the last number of an unmarked response is its answer.
    """
    if extract is not None:
        return extracted(text, extract)
    marked = _marked(text)
    if marked is not None:
        return marked
    return last_number(text) if numeric else text


def answer_of_reference(text: str, extract: re.Pattern[str] | None = None) -> str:
    """Return the answer of a reference: marked as in a response, else the last number of prose, else the whole text."""
    answer = extracted(text, extract) if extract is not None else _marked(text)
    if answer is not None:
        return answer

    # Three words or more, or a long text, are a solution in prose. Words in \text{...} are units of an answer.
    is_prose = len(_WORDS.findall(_TEXT.sub(" ", text))) >= 3 or len(text) > MAX_LETTERS
    return (last_number(text) if is_prose else None) or text


def last_number(text: str) -> str | None:
    """Return the last number of a text, with its sign, its fraction bar and its percent sign."""
    last_digit = len(text) - 1
    while last_digit >= 0 and not (text[last_digit].isascii() and text[last_digit].isdigit()):
        last_digit -= 1
    if last_digit < 0:
        return None

    # Search only around the last digit: the time does not grow with the text.
    window = text[max(0, last_digit - MAX_LETTERS) : last_digit + _BEHIND]
    return [match.group() for match in _LAST_NUMBER.finditer(window)][-1]


def equal(first: str, second: str, tolerance: tuple[Fraction, Fraction], percent: Percent = "hundredth") -> bool:
    """Return whether two answers are the same number, the same tuple or set of answers, or the same text."""
    if first == second or _as_text(first) == _as_text(second):
        return True

    # Item by item. The brackets are items, too, so that a closed interval is not equal to an open one.
    first_items = _items(first)
    second_items = _items(second)
    if first_items is not None and second_items is not None:
        if len(first_items) != len(second_items):
            return False
        if first_items[0] == second_items[0] == "\\{":
            return _same_set(first_items[1:-1], second_items[1:-1], tolerance, percent)
        return all(equal(*pair, tolerance, percent) for pair in zip(first_items, second_items, strict=True))

    # |a - b| <= max(rel_tol max(|a|, |b|), abs_tol), as in `math.isclose`, on exact fractions.
    a = _value(first, percent)
    b = _value(second, percent)
    if a is None or b is None:
        return False
    rel_tol, abs_tol = tolerance
    return abs(a - b) <= max(rel_tol * max(abs(a), abs(b)), abs_tol)


def number(text: str, percent: Percent = "hundredth") -> Fraction:
    """Return the value of an answer, or raise `NotANumber`; 50% is 0.5 (`hundredth`) or 50 (`ignored`)."""
    # "x = 3 \text{ cm}" and "3 cm" are 3. A long text is no number, so no unit is searched for in it.
    without_unit = _TEXT_UNIT.sub("", text) if len(text) <= MAX_LETTERS else text
    plain = _plain(without_unit).rpartition("=")[2]
    if len(plain) > MAX_LETTERS:
        raise NotANumber(text)

    reader = _Reader(_UNIT.sub("", plain).strip(), percent)
    try:
        value = reader.sum()
    except (ZeroDivisionError, OverflowError, RecursionError) as error:
        raise NotANumber(text) from error

    # The grammar ends where no rule fits: what follows, such as the ")" of "1)", makes the text no number.
    if reader.next():
        raise NotANumber(f"{reader.next()!r} is left over")
    return value


def _value(text: str, percent: Percent) -> Fraction | None:
    try:
        return number(text, percent)
    except NotANumber:
        return None


def _uniform(answer: str, percent: Percent) -> str:
    """Return a text that equal numbers have in common."""
    value = _value(answer, percent)
    return _as_text(answer) if value is None else str(value)


@lru_cache(maxsize=2048)
def _plain(text: str) -> str:
    """Return the text without LaTeX formatting, in a uniform spelling."""
    if len(text) > 4 * MAX_LETTERS:
        return text
    for spelling, uniform in _SPELLINGS.items():
        text = text.replace(spelling, uniform)

    # \text{...} becomes its content. The order matters: removed formatting can leave a full stop or spaces at the end.
    bare = _DRESSING.sub("", _TEXT.sub(r" \1 ", text)).strip().removesuffix(".").strip()

    # No spaces around operators and brackets, and x^{2} as x^2; other white space is one space: "1 3/4" is not "13/4".
    bare = _ONE_LETTER.sub(r"\1\2", re.sub(r"\s*([-+*/^_=(){}\[\]])\s*", r"\1", bare))
    return re.sub(r"\s+", " ", bare)


def _as_text(text: str) -> str:
    """Return the form in which texts are compared: no white space, no `x =`, no brackets around a single letter."""
    plain = _plain(text).replace(" ", "")

    # "(B)" is "B", and "x=3" is "3".
    choice = _CHOICE.fullmatch(plain)
    if choice:
        return choice[1]
    name = _NAMED.match(plain)
    return plain[name.end() :] if name else plain


def _items(text: str) -> list[str] | None:
    r"""Return the items of `(1, 2)`, `[0, 1)` or `\{1, 2\}`, including the brackets; None for any other text."""
    plain = _as_text(text)
    if len(plain) > MAX_LETTERS:
        return None

    # `\{1\}` is a set of one number, but `(1)` is a number in brackets: a tuple needs a comma.
    is_set = plain.startswith("\\{") and plain.endswith("\\}")
    n_bracket = 2 if is_set else 1  # characters of a bracket
    inside = plain[n_bracket:-n_bracket]
    is_tuple = plain[:1] in "([" and plain[-1:] in ")]" and "," in inside
    if not (is_set or is_tuple):
        return None

    # Only commas outside of inner brackets separate. In "(1,2)+(3,4)" the first bracket is not closed by the last.
    items = []
    depth = 0
    start = 0
    for index, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0:
            items.append(inside[start:index])
            start = index + 1
    return [plain[:n_bracket], *items, inside[start:], plain[-n_bracket:]]


def _same_set(first: list[str], second: list[str], tolerance: tuple[Fraction, Fraction], percent: Percent) -> bool:
    # Each item takes one of the other set, so that {1, 1, 2} does not equal {1, 2, 2}.
    unmatched = list(second)
    for item in first:
        matches = [index for index, other in enumerate(unmatched) if equal(item, other, tolerance, percent)]
        if not matches:
            return False
        del unmatched[matches[0]]
    return True


def _marked(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` or `\fbox{}`, else the rest of the line after the last `####`."""
    box = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if box >= 0:
        # A box without its closing brace, as at the length limit, is no answer.
        start = text.index("{", box) + 1
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end]

    hashes = text.rfind("####")
    return text[hashes + 4 :].strip().partition("\n")[0] if hashes >= 0 else None


class NotANumber(ValueError):  # noqa: N818  (a result, not a failure)
    """Raised for a text that is not a number in this grammar."""


class _Reader:
    """Recursive-descent parser of the tokens of an expression."""

    def __init__(self, text: str, percent: Percent) -> None:
        # `findall` skips what is no token: then the tokens are not the whole text.
        tokens = _TOKEN.findall(text)
        if "".join(tokens) != text.rstrip():
            raise NotANumber(text)

        self.tokens = [token.strip() for token in tokens]
        self.position = 0
        self.depth = 0
        self.percent = Fraction(1, 100) if percent == "hundredth" else Fraction(1)

    def next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next()
        self.position += 1
        return token

    def accept(self, *tokens: str) -> str:
        """Take the next token if it is one of these."""
        return self.take() if self.next() in tokens else ""

    # sum := product (("+" | "-") product)*
    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.accept("+", "-"):
            value = _bounded(value + self.product() if sign == "+" else value - self.product())
        return value

    # product := power (("*" | "/" | \times | \cdot | \div | nothing) power)*
    def product(self) -> Fraction:
        value = self.power()
        while (token := self.next()) not in ("", "+", "-", ")", "}", "]", "^"):
            # Without an operator, only a bracket or a command is a factor, as in 2(3) and 2\pi: "2 3" is no number.
            if self.accept("/", "\\div"):
                value = value / self.power()
            elif self.accept("*", "\\times", "\\cdot") or not _is_literal(token):
                value = value * self.power()
            else:
                raise NotANumber("two numbers in a row")
            value = _bounded(value)
        return value

    # power := ("+" | "-")* atom "%"* ("^" power)?
    def power(self) -> Fraction:
        sign = 1
        while token := self.accept("+", "-"):
            if token == "-":
                sign = -sign

        value = self.atom()
        while self.accept("%", "\\%"):
            value = value * self.percent

        # The sign is applied last: -2^2 is -4. The recursion makes powers right-associative: 2^3^2 is 2^9.
        if self.accept("^"):
            value = _raised(value, self.nested(self.power))
        return sign * value

    # atom := number | integer fraction | "(" sum ")" | \frac{sum}{sum} | \sqrt[sum]{sum} | \pi
    def atom(self) -> Fraction:
        token = self.take()
        if _is_literal(token):
            return _literal(token) + (self.fraction() if token.isdigit() else 0)
        if token in ("(", "{", "["):
            return self.inside({"(": ")", "{": "}", "[": "]"}[token])
        if token == "\\frac":
            above = self.argument()
            return above / self.argument()

        if token == "\\sqrt":
            degree = self.inside("]") if self.accept("[") else Fraction(2)
            return _root(self.argument(), degree)
        if token == "\\pi":
            return Fraction(math.pi)
        raise NotANumber(f"{token!r}")

    def fraction(self) -> Fraction:
        r"""Read the fraction of a mixed number, as in `1 3/4` and `3\frac{1}{2}`; 0 if there is none."""
        if self.next() == "\\frac":
            return self.atom()

        # All three tokens are needed before one is taken: in "1 3" and "2/3" there is no fraction after the integer.
        above, bar, below = (*self.tokens[self.position : self.position + 3], "", "", "")[:3]
        if not (above.isdigit() and bar == "/" and below.isdigit()):
            return Fraction(0)
        self.position += 3
        return _literal(above) / _literal(below)

    def argument(self) -> Fraction:
        r"""Read an argument in braces, or one digit as in `\frac12`."""
        if self.accept("{"):
            return self.inside("}")
        token = self.take()
        if not token[:1].isdigit():
            raise NotANumber("an argument is missing")

        # \frac12 is 1/2, although 12 is one token: the digits after the first one go back as a token of their own.
        if len(token) > 1:
            self.position -= 1
            self.tokens[self.position] = token[1:]
        return Fraction(int(token[0]))

    def inside(self, closing: str) -> Fraction:
        value = self.nested(self.sum)
        if self.take() != closing:
            raise NotANumber(f"{closing!r} is missing")
        return value

    def nested(self, read: Callable[[], Fraction]) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotANumber("nested too deeply")
        value = read()
        self.depth -= 1
        return value


def _is_literal(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


def _literal(token: str) -> Fraction:
    # 10^e has 3.3 e bits: a short text such as 1e999999 would fill the memory.
    digits, _, exponent = token.replace(",", "").lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_BITS // 4:
        raise NotANumber(token)
    return Fraction(digits) * (Fraction(10) ** int(exponent) if exponent else 1)


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    # A power has about exponent x bits of its base, which is checked before it is computed.
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits <= MAX_BITS:
            return base ** int(exponent)
        raise NotANumber("power too large")

    if base < 0:
        raise NotANumber("root of a negative number")
    return _of_float(float(base) ** float(exponent))


def _root(value: Fraction, degree: Fraction) -> Fraction:
    """Return the exact root if it is a fraction, else a float approximation."""
    if degree.denominator != 1 or not 1 <= degree <= 64:
        raise NotANumber("unsupported degree of a root")
    n = int(degree)
    if value < 0 and n % 2 == 0:
        raise NotANumber("root of a negative number")

    # A fraction in lowest terms has a rational root only if both of its terms have one. The rounded float is a guess,
    # which the power checks exactly.
    sign = -1 if value < 0 else 1
    above = round(float(abs(value.numerator)) ** (1 / n))
    below = round(float(value.denominator) ** (1 / n))
    if above**n == abs(value.numerator) and below**n == value.denominator:
        return Fraction(sign * above, below)
    return sign * _of_float(float(abs(value)) ** (1 / n))


def _of_float(value: float) -> Fraction:
    if not math.isfinite(value):
        raise NotANumber("not finite")
    return Fraction(value)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotANumber("too large")
    return value
