"""Rewards that check an answer: a pattern, the references as text, the references as numbers."""

from __future__ import annotations

from typing import Any, Literal

from rl4lms_like.core.numbers import Finite, NonNegative
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.answers import (
    Flag,
    Normalisation,
    as_rewards,
    check_group,
    compiled,
    exact_matches,
    matches,
)
from rl4lms_like.scoring.math_answers import math_equal
from rl4lms_like.scoring.math_numbers import Percents


class RegexReward(TextReward):
    """`reward` where the response fits a regular expression of Python, else `penalty`.

    A pattern that repeats repetitions, as `(a+)+$`, can take for ever on a long response; nothing ends it.

    Args:
        pattern: the regular expression.
        group: the group, by number or name, that has to take part in the match; 0 is the whole.
        match: anywhere in the response (`search`), at its start (`match`), or all of it (`fullmatch`).
        flags: of Python's `re`.
        invert: pay `reward` where it does not fit.
        reward: for a fit.
        penalty: for none.
    """

    def __init__(
        self,
        pattern: str,
        group: int | str = 0,
        match: Literal["search", "match", "fullmatch"] = "search",
        flags: list[Flag] | None = None,
        invert: bool = False,
        reward: Finite = 1.0,
        penalty: Finite = 0.0,
    ) -> None:
        self.pattern = compiled(pattern, flags or ())
        check_group(self.pattern, group)
        self.group, self.match, self.invert = group, match, invert
        self.reward, self.penalty = reward, penalty

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        fit = matches(gen_texts, self.pattern, group=self.group, match=self.match, invert=self.invert)
        return as_rewards(fit, self.reward, self.penalty)


class ExactMatchReward(TextReward):
    """`reward` where the response, or the answer in it, is one of the references, else `penalty`.

    Args:
        ignore_case: upper and lower case are the same.
        ignore_whitespace: white space around counts for nothing, and inside as one space.
        ignore_punctuation: ASCII punctuation is left out.
        ignore_articles: the words a, an, the are left out; with case and punctuation, SQuAD's normalisation.
        extract: regular expression of the answer: the first group of its last match; without a match the response is
            wrong. Of a reference it takes the answer too, or the whole without a match.
        reward: for a match.
        penalty: for none.
    """

    needs_references = True

    def __init__(
        self,
        ignore_case: bool = False,
        ignore_whitespace: bool = True,
        ignore_punctuation: bool = False,
        ignore_articles: bool = False,
        extract: str | None = None,
        reward: Finite = 1.0,
        penalty: Finite = 0.0,
    ) -> None:
        self.how = Normalisation(
            ignore_case=ignore_case,
            ignore_whitespace=ignore_whitespace,
            ignore_punctuation=ignore_punctuation,
            ignore_articles=ignore_articles,
            extract=None if extract is None else compiled(extract),
        )
        self.reward, self.penalty = reward, penalty

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        return as_rewards(exact_matches(gen_texts, ref_texts, self.how), self.reward, self.penalty)


class MathEqualReward(TextReward):
    r"""`reward` where the response ends in the number, or the LaTeX, of a reference, else `penalty`.

    The answer is in the last `\boxed{}`, else behind the last `####`, else the last number. Fractions, percent signs,
    thousands separators, exponents, `\frac`, `\sqrt`, units, tuples and sets are read; nothing is run as code. Where a
    response goes on after its answer, `extract` finds it: `answer is ([^ ]+)`.

    Args:
        rel_tol: numbers are equal if they differ by at most this share of the larger one.
        abs_tol: or by at most this.
        percent: 50% is 0.5 (`hundredth`), 50 (`ignored`), or what makes the answers equal (`either`).
        extract: regular expression of the answer instead: the first group of its last match.
        reward: for an equal answer.
        penalty: for another, or none.
    """

    needs_references = True

    def __init__(
        self,
        rel_tol: NonNegative = 1e-6,
        abs_tol: NonNegative = 0.0,
        percent: Percents = "either",
        extract: str | None = None,
        reward: Finite = 1.0,
        penalty: Finite = 0.0,
    ) -> None:
        self.rel_tol, self.abs_tol, self.percent = rel_tol, abs_tol, percent
        self.extract = None if extract is None else compiled(extract)
        self.reward, self.penalty = reward, penalty

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        right = math_equal(
            gen_texts,
            ref_texts,
            rel_tol=self.rel_tol,
            abs_tol=self.abs_tol,
            percent=self.percent,
            extract=self.extract,
        )
        return as_rewards(right, self.reward, self.penalty)
