"""Metrics that check an answer, as the rewards with the same ids: 1 or 0 for each text, and the fraction of 1."""

from __future__ import annotations

from rl4lms_like.metrics.base import ScoreMetric
from rl4lms_like.scoring.answers import ExactMatch, Regex
from rl4lms_like.scoring.math_answers import MathEqual
from rl4lms_like.scoring.reasoning_gym import ReasoningGym


class RegexMetric(Regex, ScoreMetric):
    """Fraction of responses that match a Python regular expression."""

    keys = ("answers/regex",)


class ExactMatchMetric(ExactMatch, ScoreMetric):
    """Fraction of responses that equal one of their references; responses without references are excluded."""

    keys = ("answers/exact_match",)


class MathEqualMetric(MathEqual, ScoreMetric):
    r"""Fraction of responses whose final number or LaTeX answer equals a reference.

    The answer is the content of the last `\boxed{}`, else the text after the last `####`, else the last number.
    Responses without references are excluded.
    """

    keys = ("answers/math_equal",)


class ReasoningGymMetric(ReasoningGym, ScoreMetric):
    """Fraction of responses that are the stored answer; with `strict: false`, the mean of the package's own scores.

    Responses without references are excluded.
    """

    keys = ("answers/reasoning_gym",)
