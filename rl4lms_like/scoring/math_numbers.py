r"""Parser of plain and LaTeX numbers into exact fractions; nothing is ever evaluated as code.

    sum      := product (("+" | "-") product)*
    product  := power (("*" | "/" | \times | \cdot | \div | nothing) power)*
    power    := ("+" | "-")* atom "%"* ("^" power)?
    atom     := number | "(" sum ")" | \frac{sum}{sum} | \sqrt[sum]{sum} | \pi

A fraction after an integer is added, not multiplied: 3\frac{1}{2} and 1 3/4 are mixed numbers. Time and memory are
bounded: expressions that are too large or nested too deeply are not numbers. Inexact roots and powers are floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

MAX_BITS = 4096
"""Maximum number of bits of a numerator or denominator."""

MAX_DEPTH = 40
"""Maximum depth of nested brackets."""

Percent = Literal["hundredth", "ignored"]
"""Meaning of a percent sign: division by 100, or nothing."""

Percents = Literal["either", "hundredth", "ignored"]
"""As `Percent`; `either`: whichever makes two answers equal, as in graders of MATH and GSM8K."""

NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,6}(?![\d.]))?"
"""Regular expression of a number: digits, thousands separators, a decimal point, an exponent."""

_TOKEN = re.compile(rf"\s*(?:{NUMBER}|\\[a-zA-Z]+|\\?%|[-+*/^(){{}}\[\]])", re.ASCII)


class NotANumber(ValueError):  # noqa: N818  (a result, not a failure)
    """Raised for a text that is not a number in this grammar."""


def read_number(text: str, percent: Percent = "hundredth") -> Fraction:
    """Return the value of an expression.

    Args:
        text: the expression, without any other text.
        percent: 50% is 0.5 (`hundredth`) or 50 (`ignored`).

    Raises:
        NotANumber: the text is not a number.
    """
    try:
        return _Reader(text, percent).whole()
    except (ZeroDivisionError, OverflowError, RecursionError) as error:
        raise NotANumber(text) from error


class _Reader:
    """Recursive-descent parser of the tokens of an expression."""

    def __init__(self, text: str, percent: Percent) -> None:
        self.tokens = list(_tokens(text))
        self.place = 0
        self.depth = 0
        self.percent = Fraction(1, 100) if percent == "hundredth" else Fraction(1)

    def whole(self) -> Fraction:
        value = self.sum()
        if self.place < len(self.tokens):
            raise NotANumber("tokens are left over")
        return value

    def sum(self) -> Fraction:
        value = self.product()
        while self.next() in ("+", "-"):
            sign = self.take()
            value = _bounded(value + self.product() if sign == "+" else value - self.product())
        return value

    def product(self) -> Fraction:
        was_integer, negative = self.starts_with_integer()
        value = self.power()
        while (token := self.next()) not in ("", "+", "-", ")", "}", "]", "^"):
            if token in ("*", "\\times", "\\cdot"):
                self.take()
                value = value * self.power()
            elif token in ("/", "\\div"):
                self.take()
                value = value / self.power()
            elif was_integer and token in ("\\frac", "\\dfrac", "\\tfrac"):  # 3\frac{1}{2} is three and a half
                value = value - self.power() if negative else value + self.power()
            elif token[0].isdigit() or token[0] == ".":
                if not (was_integer and self.is_fraction()):  # 1 3/4
                    raise NotANumber("two numbers in a row")
                part = self.power() / self.after_bar()
                value = value - part if negative else value + part
            else:
                value = value * self.power()
            was_integer = False
            value = _bounded(value)
        return value

    def power(self) -> Fraction:
        sign = 1
        while self.next() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        value = self.atom()
        while self.next() in ("%", "\\%"):
            self.take()
            value = value * self.percent
        if self.next() == "^":
            self.take()
            value = _raised(value, self.nested(self.power))
        return sign * value

    def atom(self) -> Fraction:
        token = self.take()
        if token[:1].isdigit() or token[:1] == ".":
            return _literal(token)
        if token in ("(", "{", "["):
            return self.inside({"(": ")", "{": "}", "[": "]"}[token])
        if token in ("\\frac", "\\dfrac", "\\tfrac"):
            above = self.argument()
            return above / self.argument()
        if token == "\\sqrt":
            degree = self.optional()
            return _root(self.argument(), degree)
        if token == "\\pi":
            return Fraction(math.pi)
        raise NotANumber(f"{token!r}")

    def argument(self) -> Fraction:
        r"""Read an argument in braces, or one digit as in `\frac12`."""
        if self.next() == "{":
            self.take()
            return self.inside("}")
        token = self.take()
        if not token[:1].isdigit():
            raise NotANumber("an argument is missing")
        if len(token) > 1:
            self.place -= 1
            self.tokens[self.place] = token[1:]  # the remaining digits are a token of their own
        return Fraction(int(token[0]))

    def optional(self) -> Fraction:
        if self.next() != "[":
            return Fraction(2)
        self.take()
        return self.inside("]")

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

    def starts_with_integer(self) -> tuple[bool, bool]:
        """Return whether an integer comes next, after its signs, and whether they make it negative."""
        ahead = self.place
        while ahead < len(self.tokens) and self.tokens[ahead] in ("+", "-"):
            ahead += 1
        signs = self.tokens[self.place : ahead]
        return ahead < len(self.tokens) and self.tokens[ahead].isdigit(), signs.count("-") % 2 == 1

    def is_fraction(self) -> bool:
        ahead = self.tokens[self.place : self.place + 3]
        return len(ahead) == 3 and ahead[0].isdigit() and ahead[1] == "/" and ahead[2].isdigit()

    def after_bar(self) -> Fraction:
        self.take()
        return self.atom()

    def next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next()
        self.place += 1
        return token


def _tokens(text: str) -> list[str]:
    place, tokens = 0, []
    text = text.rstrip()
    while place < len(text):
        hit = _TOKEN.match(text, place)
        if hit is None:
            raise NotANumber(text)
        tokens.append(hit.group().strip())
        place = hit.end()
    return tokens


def _literal(token: str) -> Fraction:
    digits, _, exponent = token.replace(",", "").lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_BITS // 4:
        raise NotANumber(token)
    return Fraction(digits) * (Fraction(10) ** int(exponent) if exponent else 1)


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
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
    sign = -1 if value < 0 else 1
    above, below = (round(float(part) ** (1 / n)) for part in (abs(value.numerator), value.denominator))
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
