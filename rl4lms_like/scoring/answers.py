"""Checks of answers: texts against a pattern, texts against the references.

    "The answer is: The Cat."  --extract-->  "The Cat."  --normalise-->  "cat"  ==  "cat"  <--  "a cat"

`ignore_case`, `ignore_punctuation` and `ignore_articles` together are the normalisation of SQuAD (arXiv 1606.05250).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rl4lms_like.scoring.score import Score, Texts

Flag = Literal["ignorecase", "multiline", "dotall", "verbose", "ascii"]

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compiled(pattern: str, flags: Sequence[str] = ()) -> re.Pattern[str]:
    """Compile a regular expression, or raise a `ValueError` with the position of the error."""
    try:
        return re.compile(pattern, sum((re.RegexFlag[flag.upper()] for flag in flags), re.RegexFlag(0)))
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from error


def check_group(pattern: re.Pattern[str], group: int | str) -> None:
    """Raise a `ValueError` for a group that the pattern does not have."""
    names: Mapping[str, int] = pattern.groupindex
    exists = group in names if isinstance(group, str) else 0 <= group <= pattern.groups
    if not exists:
        has = ", ".join(map(str, [*range(1, pattern.groups + 1), *names])) or "none"
        raise ValueError(f"{pattern.pattern!r} has no group {group!r}; it has {has}")


@dataclass(eq=False)
class Regex(Score):
    """1 for each response that matches a Python regular expression, else 0.

    Args:
        pattern: the regular expression.
        group: the group, by number or name, that must take part in the match; 0 is the whole match.
        match: where to match: anywhere in the response (`search`), at its start (`match`), or all of it (`fullmatch`).
        flags: flags of Python's `re` module.
        invert: the opposite: a response that does not match counts as a match.
    """

    pattern: str
    group: int | str = 0
    match: Literal["search", "match", "fullmatch"] = "search"
    flags: list[Flag] | None = None
    invert: bool = False

    def __post_init__(self) -> None:
        self._compiled = compiled(self.pattern, self.flags or ())
        check_group(self._compiled, self.group)

    def per_text(self, texts: Texts) -> list[float]:
        search = getattr(self._compiled, self.match)
        scores = []
        for response in texts.responses:
            # A group that takes no part in the match is None: `(a)|b` matches "b" without its group 1.
            match = search(response)
            is_match = match is not None and match.group(self.group) is not None
            scores.append(float(is_match != self.invert))
        return scores


@dataclass(eq=False)
class ExactMatch(Score):
    """1 for each response that equals, or whose answer equals, one of its references, else 0.

    Args:
        ignore_case: treat upper and lower case as equal.
        ignore_whitespace: strip surrounding whitespace and collapse inner whitespace to one space.
        ignore_punctuation: remove ASCII punctuation.
        ignore_articles: remove the words a, an, the; together with case and punctuation this is SQuAD's normalisation.
        extract: regular expression that finds the answer: the first group of its last match. A response without a match
            is wrong. It is also applied to references; a reference without a match is used whole.
    """

    needs_references = True

    ignore_case: bool = False
    ignore_whitespace: bool = True
    ignore_punctuation: bool = False
    ignore_articles: bool = False
    extract: str | None = None

    def __post_init__(self) -> None:
        self._extract = None if self.extract is None else compiled(self.extract)

    def per_text(self, texts: Texts) -> list[float]:
        @cache  # samples of one prompt share their references
        def expected(reference: str) -> str:
            answer = None if self._extract is None else extracted(reference, self._extract)
            return self.normalised(reference if answer is None else answer)

        scores = []
        for answer, references in zip(self.answers(texts), texts.references, strict=True):
            scores.append(float(any(answer == expected(reference) for reference in references)))
        return scores

    def answers(self, texts: Texts) -> list[str | None]:
        """Return the normalised answer of each response; None for a response without one."""
        answers = []
        for response in texts.responses:
            answer = response if self._extract is None else extracted(response, self._extract)
            answers.append(None if answer is None else self.normalised(answer))
        return answers

    def normalised(self, text: str) -> str:
        """Return the normalised text."""
        # In SQuAD's order: punctuation comes before articles, so that "a-b" becomes "ab", and white space comes last,
        # because an article leaves some.
        if self.ignore_case:
            text = text.lower()
        if self.ignore_punctuation:
            text = text.translate(_NO_PUNCTUATION)
        if self.ignore_articles:
            text = _ARTICLES.sub(" ", text)
        return " ".join(text.split()) if self.ignore_whitespace else text


def extracted(text: str, pattern: re.Pattern[str]) -> str | None:
    """Return the first participating group of a pattern's last match, or the whole match; None without a match.

    Empty matches are ignored: `.*` has one at the end of every text.
    """
    last = None
    for match in pattern.finditer(text):
        if match.group():
            last = match
    if last is None:
        return None

    # `answer: (.+)|= (.+)` has two groups, of which one takes part.
    return next((group for group in last.groups() if group is not None), last.group())
