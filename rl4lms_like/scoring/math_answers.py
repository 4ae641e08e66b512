r"""Comparison of mathematical answers: the final answer of a text as an exact fraction, never evaluated as code.

    "... so \boxed{\frac{1}{2}} apples"  ->  \frac{1}{2}  ->  1/2
    "#### 1,234.50"                      ->  1,234.50     ->  2469/2
    "The answer is 3.5e2 %"              ->  3.5e2 %      ->  7/2

Answers that are not numbers are compared as text without white space. `(1, 2)`, `[0, 1)` and `\{1, 2\}` are compared
part by part, sets in any order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rl4lms_like.core.numbers import NonNegative
from rl4lms_like.scoring.answers import compiled, extracted
from rl4lms_like.scoring.math_numbers import NUMBER, NotANumber, Percent, Percents, read_number
from rl4lms_like.scoring.score import Score, Texts

MAX_LETTERS = 300
"""Maximum number of characters of an answer that is parsed; longer answers are compared as text."""

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
_BEHIND = 60
"""Characters after the last digit that may belong to its number: closing braces, a percent sign."""

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

    The answer is the content of the last `\boxed{}`, else the text after the last `####`, else the last number.
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
        known: dict[str, tuple[str, bool]] = {}

        def wanted(reference: str) -> tuple[str, bool]:
            if reference not in known:
                answer = answer_of_reference(reference, self._extract)
                known[reference] = (answer, _is_number(answer, readings[0]))
            return known[reference]

        def is_right(response: str, reference: str) -> bool:
            answer, numeric = wanted(reference)
            given = answer_of_response(response, self._extract, numeric=numeric)
            return given is not None and any(equal(given, answer, tolerance, reading) for reading in readings)

        pairs = zip(texts.responses, texts.references, strict=True)
        return [float(any(is_right(response, text) for text in references)) for response, references in pairs]


def answer_of_response(text: str, extract: re.Pattern[str] | None = None, *, numeric: bool = True) -> str | None:
    """Return the answer of a response, or None if it has none.

    Args:
        text: the response.
        extract: pattern that finds the answer.
        numeric: the expected answer is a number, so the last number of an unmarked response is its answer.
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
    # Three words or more, or a long text, are a solution in prose.
    prose = len(_WORDS.findall(_TEXT.sub(" ", text))) >= 3 or len(text) > MAX_LETTERS
    return (last_number(text) if prose else None) or text


def last_number(text: str) -> str | None:
    """Return the last number of a text, with its sign, its fraction bar and its percent sign."""
    end = next((place for place in range(len(text) - 1, -1, -1) if text[place].isascii() and text[place].isdigit()), -1)
    if end < 0:
        return None
    # Search only around the last digit: the time does not grow with the text.
    window = text[max(0, end - MAX_LETTERS) : end + _BEHIND]
    return [hit.group() for hit in _LAST_NUMBER.finditer(window)][-1]


def equal(one: str, other: str, tolerance: tuple[Fraction, Fraction], percent: Percent = "hundredth") -> bool:
    """Return whether two answers are the same number, the same tuple or set of answers, or the same text."""
    if one == other or _as_text(one) == _as_text(other):
        return True
    mine, theirs = _parts(one), _parts(other)
    if mine is not None and theirs is not None:
        if len(mine) != len(theirs):
            return False
        if mine[0] == theirs[0] == "\\{":
            return _same_set(mine[1:-1], theirs[1:-1], tolerance, percent)
        return all(equal(*pair, tolerance, percent) for pair in zip(mine, theirs, strict=True))
    try:
        a, b = number(one, percent), number(other, percent)
    except NotANumber:
        return False
    rel_tol, abs_tol = tolerance
    return abs(a - b) <= max(rel_tol * max(abs(a), abs(b)), abs_tol)


def number(text: str, percent: Percent = "hundredth") -> Fraction:
    """Return the value of an answer.

    Raises:
        NotANumber: the answer is not a number.
    """
    plain = _plain(_TEXT_UNIT.sub("", text) if len(text) <= MAX_LETTERS else text)
    if "=" in plain:
        plain = plain.rpartition("=")[2]
    if len(plain) > MAX_LETTERS:
        raise NotANumber(text)
    plain = _UNIT.sub("", plain).strip()
    return read_number(plain, percent)


def _is_number(text: str, percent: Percent) -> bool:
    try:
        number(text, percent)
    except NotANumber:
        return False
    return True


@lru_cache(maxsize=2048)
def _plain(text: str) -> str:
    """Return the text without LaTeX formatting, in a uniform spelling."""
    if len(text) > 4 * MAX_LETTERS:
        return text
    for spelling, ours in _SPELLINGS.items():
        text = text.replace(spelling, ours)
    bare = _DRESSING.sub("", _TEXT.sub(r" \1 ", text)).strip().removesuffix(".").strip()
    bare = _ONE_LETTER.sub(r"\1\2", re.sub(r"\s*([-+*/^_=(){}\[\]])\s*", r"\1", bare))
    return re.sub(r"\s+", " ", bare)


def _as_text(text: str) -> str:
    """Return the form in which texts are compared: no white space, no `x =`, no brackets around a single letter."""
    plain = _plain(text).replace(" ", "")
    choice = _CHOICE.fullmatch(plain)
    return choice[1] if choice else plain[named.end() :] if (named := _NAMED.match(plain)) else plain


def _parts(text: str) -> list[str] | None:
    r"""Return the parts of `(1, 2)`, `[0, 1)` or `\{1, 2\}`, including the brackets; None for any other text."""
    plain = _as_text(text)
    is_set = plain.startswith("\\{") and plain.endswith("\\}")
    left, right = (2, 2) if is_set else (1, 1)
    inside = plain[left:-right]
    if len(plain) > MAX_LETTERS or not (is_set or (plain[:1] in "([" and plain[-1:] in ")]" and "," in inside)):
        return None
    depth, parts, start = 0, [], 0
    for place, letter in enumerate(inside):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
        if letter == "," and depth == 0:
            parts.append(inside[start:place])
            start = place + 1
    return [plain[:left], *parts, inside[start:], plain[-right:]]


def _same_set(mine: list[str], theirs: list[str], tolerance: tuple[Fraction, Fraction], percent: Percent) -> bool:
    left = list(theirs)
    for one in mine:
        place = next((place for place, other in enumerate(left) if equal(one, other, tolerance, percent)), None)
        if place is None:
            return False
        del left[place]
    return True


def _marked(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` or `\fbox{}`, else the rest of the line after the last `####`."""
    place = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if place >= 0:
        start = text.index("{", place) + 1
        depth = 1
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start:end]
    place = text.rfind("####")
    return text[place + 4 :].strip().partition("\n")[0] if place >= 0 else None
