"""Checks of answers: texts against a pattern, texts against the references.

    "The answer is: The Cat."  --extract-->  "The Cat."  --normalise-->  "cat"  ==  "cat"  <--  "a cat"

`ignore_case`, `ignore_punctuation` and `ignore_articles` together are the normalisation of SQuAD (arXiv 1606.05250).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Flag = Literal["ignorecase", "multiline", "dotall", "verbose", "ascii"]

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compiled(pattern: str, flags: Sequence[str] = ()) -> re.Pattern[str]:
    """Compile a regular expression.

    Raises:
        ValueError: the pattern is invalid; the message has the position of the error.
    """
    try:
        return re.compile(pattern, sum((re.RegexFlag[flag.upper()] for flag in flags), re.RegexFlag(0)))
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from error


def check_group(pattern: re.Pattern[str], group: int | str) -> None:
    """Raise an error for a group that the pattern does not have.

    Raises:
        ValueError: the pattern has no such group.
    """
    names: Mapping[str, int] = pattern.groupindex
    if group not in names if isinstance(group, str) else not 0 <= group <= pattern.groups:
        has = ", ".join(map(str, [*range(1, pattern.groups + 1), *names])) or "none"
        raise ValueError(f"{pattern.pattern!r} has no group {group!r}; it has {has}")


def matches(
    texts: Sequence[str],
    pattern: re.Pattern[str],
    *,
    group: int | str = 0,
    match: Literal["search", "match", "fullmatch"] = "search",
    invert: bool = False,
) -> list[bool]:
    """Return whether each text matches a pattern.

    Args:
        texts: `n` texts.
        pattern: the regular expression.
        group: group that must take part in the match; 0 is the whole match.
        match: where to match: anywhere in the text (`search`), at its start (`match`), or all of it (`fullmatch`).
        invert: return whether each text does not match.
    """
    find = getattr(pattern, match)
    found = (find(text) for text in texts)
    return [(hit is not None and hit.group(group) is not None) != invert for hit in found]


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Normalisation of answers before they are compared.

    Args:
        ignore_case: treat upper and lower case as equal.
        ignore_whitespace: strip surrounding whitespace and collapse inner whitespace to one space.
        ignore_punctuation: remove ASCII punctuation.
        ignore_articles: remove the words a, an, the.
        extract: pattern that finds the answer in a text.
    """

    ignore_case: bool = False
    ignore_whitespace: bool = True
    ignore_punctuation: bool = False
    ignore_articles: bool = False
    extract: re.Pattern[str] | None = None

    def normalised(self, text: str) -> str:
        """Return the normalised text."""
        if self.ignore_case:
            text = text.lower()
        if self.ignore_punctuation:
            text = text.translate(_NO_PUNCTUATION)
        if self.ignore_articles:
            text = _ARTICLES.sub(" ", text)
        return " ".join(text.split()) if self.ignore_whitespace else text

    def answer_of(self, response: str) -> str | None:
        """Return the normalised answer of a response, or None if it has none."""
        answer = response if self.extract is None else extracted(response, self.extract)
        return None if answer is None else self.normalised(answer)

    def reference(self, text: str) -> str:
        """Return the normalised answer of a reference: the extracted text, or the whole text without a match."""
        answer = None if self.extract is None else extracted(text, self.extract)
        return self.normalised(text if answer is None else answer)


def extracted(text: str, pattern: re.Pattern[str]) -> str | None:
    """Return the first participating group of a pattern's last match, or the whole match; None without a match.

    Empty matches are ignored: `.*` has one at the end of every text.
    """
    last = None
    for hit in pattern.finditer(text):
        last = hit if hit.group() else last
    if last is None:
        return None
    return next((group for group in last.groups() if group is not None), last.group())


def exact_matches(
    responses: Sequence[str], references: Sequence[Sequence[str]], how: Normalisation
) -> list[bool | None]:
    """Return whether each response equals one of its references; None for a response without references."""
    known: dict[str, str] = {}

    def reference(text: str) -> str:
        if text not in known:
            known[text] = how.reference(text)
        return known[text]

    found: list[bool | None] = []
    for response, texts in zip(responses, references, strict=True):
        answer = how.answer_of(response)
        found.append(any(answer == reference(text) for text in texts) if len(texts) else None)
    return found


def as_rewards(right: Sequence[bool | None], reward: float, penalty: float) -> list[float]:
    """Return `reward` for each right answer, `penalty` for each wrong one.

    Raises:
        ValueError: an answer has no references to compare with.
    """
    if None in right:
        raise ValueError(f"entry {right.index(None)} has no references to compare with")
    return [reward if is_right else penalty for is_right in right]


def as_results(key: str, right: Sequence[bool | None]) -> dict[str, tuple[list[float] | None, float]]:
    """Return a metric's results: 1, 0 or NaN for each text, and the fraction of 1 among texts with references."""
    scores = [float("nan") if is_right is None else float(is_right) for is_right in right]
    told = [score for score in scores if score == score]  # without NaN
    return {key: (scores, sum(told) / len(told) if told else float("nan"))}
