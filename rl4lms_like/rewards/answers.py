"""Rewards that check an answer: against a pattern, against references as text, or against references as numbers."""

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
    """Reward that is `reward` if the response matches a Python regular expression, else `penalty`.

    A pattern with nested repetitions, such as `(a+)+$`, can run almost forever on a long response. There is no timeout.

    Args:
        pattern: the regular expression.
        group: the group, by number or name, that must take part in the match; 0 is the whole match.
        match: where to match: anywhere in the response (`search`), at its start (`match`), or all of it (`fullmatch`).
        flags: flags of Python's `re` module.
        invert: give `reward` to responses that do not match.
        reward: value for a match.
        penalty: value for no match.
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
    """Reward that is `reward` if the response, or the answer in it, equals a reference, else `penalty`.

    Args:
        ignore_case: treat upper and lower case as equal.
        ignore_whitespace: strip surrounding whitespace and collapse inner whitespace to one space.
        ignore_punctuation: remove ASCII punctuation.
        ignore_articles: remove the words a, an, the; together with case and punctuation this is SQuAD's normalisation.
        extract: regular expression that finds the answer: the first group of its last match. A response without a match
            is wrong. It is also applied to references; a reference without a match is used whole.
        reward: value for a match.
        penalty: value for no match.
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
    r"""Reward that is `reward` if the final number or LaTeX answer equals a reference, else `penalty`.

    The answer is the content of the last `\boxed{}`, else the text after the last `####`, else the last number.
    Fractions, percent signs, thousands separators, exponents, `\frac`, `\sqrt`, units, tuples and sets are parsed.
    Nothing is executed as code. If responses continue after the answer, set `extract`, e.g. `answer is ([^ ]+)`.

    Args:
        rel_tol: numbers are equal if they differ by at most this fraction of the larger one.
        abs_tol: numbers are also equal if they differ by at most this.
        percent: read 50% as 0.5 (`hundredth`), as 50 (`ignored`), or as whichever makes the answers equal (`either`).
        extract: regular expression that finds the answer instead: the first group of its last match.
        reward: value for an equal answer.
        penalty: value for a different answer or none.
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
