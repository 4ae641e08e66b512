"""Rewards that check an answer: against a pattern, against references as text, or against references as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl4lms_like.rewards.text import ScoreReward
from rl4lms_like.scoring.answers import ExactMatch, Regex
from rl4lms_like.scoring.math_answers import MathEqual
from rl4lms_like.scoring.reasoning_gym import ReasoningGym
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.numbers import Finite


@dataclass(eq=False, kw_only=True)
class AnswerReward(ScoreReward):
    """Reward that has one of two values.

    Args:
        reward: value for a right answer.
        penalty: value for a wrong answer or none.
    """

    reward: Finite = 1.0
    penalty: Finite = 0.0

    def scores(self, texts: Texts) -> Sequence[float]:
        rewards = []
        for is_right in super().scores(texts):
            rewards.append(self.reward if is_right else self.penalty)
        return rewards


@dataclass(eq=False)
class RegexReward(Regex, AnswerReward):
    """Reward that is `reward` if the response matches a Python regular expression, else `penalty`.

    A pattern with nested repetitions, such as `(a+)+$`, can run almost forever on a long response. There is no timeout.
    """


@dataclass(eq=False)
class ExactMatchReward(ExactMatch, AnswerReward):
    """Reward that is `reward` if the response, or the answer in it, equals a reference, else `penalty`."""


@dataclass(eq=False)
class MathEqualReward(MathEqual, AnswerReward):
    r"""Reward that is `reward` if the final number or LaTeX answer equals a reference, else `penalty`.

    The answer is the content of the last `\boxed{}`, else the text after the last `####`, else the last number.
    Fractions, percent signs, thousands separators, exponents, `\frac`, `\sqrt`, units, tuples and sets are parsed.
    Nothing is executed as code. If responses continue after the answer, set `extract`, e.g. `answer is ([^ ]+)`.
    """


class ReasoningGymReward(ReasoningGym, ScoreReward):
    """Reward that is 1 if the response is the stored answer, else 0; with `strict: false`, the package's own score.

    White space around an answer is removed and inner white space is collapsed, for both scores. The package's scorers
    accept other spellings of a number and, for puzzles, every right solution. Some also score wrong texts above 0:
    most data sets score a text that contains the answer by its length, and several score any text, up to 1 for
    `game_of_life_halting`. A policy finds such texts. Some scorers raise an error for a text that they cannot parse.
    """
