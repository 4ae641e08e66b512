"""The rewards that check an answer, as metrics: 1 or 0 for each text, and the share of right ones."""

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
    """Share of responses that fit a regular expression of Python.

    Args:
        pattern: the regular expression.
        group: the group, by number or name, that has to take part in the match; 0 is the whole.
        match: anywhere in the response (`search`), at its start (`match`), or all of it (`fullmatch`).
        flags: of Python's `re`.
        invert: share of those that do not fit.
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
        """`answers/regex`."""
        fit = matches(generated_texts, self.pattern, group=self.group, match=self.match, invert=self.invert)
        return as_results("answers/regex", fit)


class ExactMatchMetric(BaseMetric):
    """Share of responses that are one of their references; those without references are left out.

    Args:
        ignore_case: upper and lower case are the same.
        ignore_whitespace: white space around counts for nothing, and inside as one space.
        ignore_punctuation: ASCII punctuation is left out.
        ignore_articles: the words a, an, the are left out; with case and punctuation, SQuAD's normalisation.
        extract: regular expression of the answer: the first group of its last match; without a match the response is
            wrong. Of a reference it takes the answer too, or the whole without a match.
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
        """`answers/exact_match`."""
        return as_results("answers/exact_match", exact_matches(generated_texts, reference_texts, self.how))


class MathEqualMetric(BaseMetric):
    r"""Share of responses that end in the number, or the LaTeX, of a reference; those without references are left out.

    The answer is in the last `\boxed{}`, else behind the last `####`, else the last number.

    Args:
        rel_tol: numbers are equal if they differ by at most this share of the larger one.
        abs_tol: or by at most this.
        percent: 50% is 0.5 (`hundredth`), 50 (`ignored`), or what makes the answers equal (`either`).
        extract: regular expression of the answer instead: the first group of its last match.
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
        """`answers/math_equal`."""
        right = math_equal(
            generated_texts,
            reference_texts,
            rel_tol=self.rel_tol,
            abs_tol=self.abs_tol,
            percent=self.percent,
            extract=self.extract,
        )
        return as_results("answers/math_equal", right)
