"""Metrics that check an answer, as the rewards with the same ids: 1 or 0 for each text, and the fraction of 1."""

from __future__ import annotations

from typing import Any, Literal

from rl4lms_like.core.numbers import NonNegative
from rl4lms_like.metrics.base import BaseMetric, MetricResults
from rl4lms_like.scoring.answers import (
    Flag,
    Normalisation,
    as_results,
    check_group,
    compiled,
    exact_matches,
    matches,
)
from rl4lms_like.scoring.math_answers import math_equal
from rl4lms_like.scoring.math_numbers import Percents


class RegexMetric(BaseMetric):
    """Fraction of responses that match a Python regular expression.

    Args:
        pattern: the regular expression.
        group: the group, by number or name, that must take part in the match; 0 is the whole match.
        match: where to match: anywhere in the response (`search`), at its start (`match`), or all of it (`fullmatch`).
        flags: flags of Python's `re` module.
        invert: report the fraction of responses that do not match.
    """

    def __init__(
        self,
        pattern: str,
        group: int | str = 0,
        match: Literal["search", "match", "fullmatch"] = "search",
        flags: list[Flag] | None = None,
        invert: bool = False,
    ) -> None:
        self.pattern = compiled(pattern, flags or ())
        check_group(self.pattern, group)
        self.group, self.match, self.invert = group, match, invert

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `answers/regex`."""
        fit = matches(generated_texts, self.pattern, group=self.group, match=self.match, invert=self.invert)
        return as_results("answers/regex", fit)


class ExactMatchMetric(BaseMetric):
    """Fraction of responses that equal one of their references; responses without references are excluded.

    Args:
        ignore_case: treat upper and lower case as equal.
        ignore_whitespace: strip surrounding whitespace and collapse inner whitespace to one space.
        ignore_punctuation: remove ASCII punctuation.
        ignore_articles: remove the words a, an, the; together with case and punctuation this is SQuAD's normalisation.
        extract: regular expression that finds the answer: the first group of its last match. A response without a match
            is wrong. It is also applied to references; a reference without a match is used whole.
    """

    needs_references = True

    def __init__(
        self,
        ignore_case: bool = False,
        ignore_whitespace: bool = True,
        ignore_punctuation: bool = False,
        ignore_articles: bool = False,
        extract: str | None = None,
    ) -> None:
        self.how = Normalisation(
            ignore_case=ignore_case,
            ignore_whitespace=ignore_whitespace,
            ignore_punctuation=ignore_punctuation,
            ignore_articles=ignore_articles,
            extract=None if extract is None else compiled(extract),
        )

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `answers/exact_match`."""
        return as_results("answers/exact_match", exact_matches(generated_texts, reference_texts, self.how))


class MathEqualMetric(BaseMetric):
    r"""Fraction of responses whose final number or LaTeX answer equals a reference.

    The answer is the content of the last `\boxed{}`, else the text after the last `####`, else the last number.
    Responses without references are excluded.

    Args:
        rel_tol: numbers are equal if they differ by at most this fraction of the larger one.
        abs_tol: numbers are also equal if they differ by at most this.
        percent: read 50% as 0.5 (`hundredth`), as 50 (`ignored`), or as whichever makes the answers equal (`either`).
        extract: regular expression that finds the answer instead: the first group of its last match.
    """

    needs_references = True

    def __init__(
        self,
        rel_tol: NonNegative = 1e-6,
        abs_tol: NonNegative = 0.0,
        percent: Percents = "either",
        extract: str | None = None,
    ) -> None:
        self.rel_tol, self.abs_tol, self.percent = rel_tol, abs_tol, percent
        self.extract = None if extract is None else compiled(extract)

    def compute(
        self,
        prompt_texts: list[str],
        generated_texts: list[str],
        reference_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None] | None = None,
        model: Any = None,
        split_name: str | None = None,
    ) -> MetricResults:
        """Compute `answers/math_equal`."""
        right = math_equal(
            generated_texts,
            reference_texts,
            rel_tol=self.rel_tol,
            abs_tol=self.abs_tol,
            percent=self.percent,
            extract=self.extract,
        )
        return as_results("answers/math_equal", right)
