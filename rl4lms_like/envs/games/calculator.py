"""A sum, and a calculator that may be asked before the answer."""

from __future__ import annotations

import math
import re

from rl4lms_like.core.sample import Sample
from rl4lms_like.envs.games.base import Step, TextGame
from rl4lms_like.system.numbers import Count

_CALL = re.compile(r"c([0-9+*-]*)")
_EXPRESSION = re.compile(r"[0-9]{1,9}(?:[+*-][0-9]{1,9}){0,9}")
_SUMMAND = re.compile(r"([+-]?)([0-9*]+)")


class Calculator(TextGame):
    """A sum of two numbers, and a calculator.

    The numbers are drawn uniformly from 0 to below `limit`; of a sample with a reference, the prompt is the question
    and the reference is its answer, as in the data pool `sums`. A turn `c263+394` asks the calculator, which answers
    `657`. It has +, -, *, numbers of up to 9 digits, of which up to 10, and no parentheses; everything else that begins
    with c is answered with `error`. A turn that does not begin with c is the final answer.

    Score: 1 if the final answer is the right one, otherwise 0.

        player          score
        best possible   1
        scripted        .65 with the calculator, .5 without

    The scripted player asks the calculator in 3 of 10 episodes, and repeats what it says. Otherwise it answers at once,
    half of the time with one digit wrong.

    Metrics: `correct`, `calls`, `failed_calls`.

    Args:
        limit: numbers are below this.
        tool: whether there is a calculator; without one, each text is the final answer.
    """

    def __init__(self, limit: Count = 100, tool: bool = True) -> None:
        self.limit = limit
        self.tool = tool

    def start(self, sample: Sample | None) -> str:
        """Return the question; see `TextGame.start`."""
        first, second = (int(number) for number in self.np_random.integers(self.limit, size=2))
        if sample is None:
            self.question = f"{first}+{second}="
            self.answer = str(first + second)
        else:
            self.question = sample.prompt_or_input_text
            self.answer = sample.references[0].strip()
        self.result: str | None = None  # what the calculator answered last
        self._metrics = {"correct": 0.0, "calls": 0.0, "failed_calls": 0.0}
        return f"{self.question}\n"

    def step(self, action: str) -> Step:
        """Answer a question to the calculator, or compare the final answer."""
        text = action.strip()
        if not (self.tool and text.startswith("c")):
            is_correct = text == self.answer
            metrics = {**self._metrics, "correct": float(is_correct)}
            return "", float(is_correct), True, False, {"metrics": metrics}

        self._metrics["calls"] += 1
        call = _CALL.fullmatch(text)
        value = calculated(call[1]) if call else None
        if value is None:
            self._metrics["failed_calls"] += 1
        self.result = "error" if value is None else str(value)
        return f"{self.result}\n", 0.0, False, False, {"metrics": dict(self._metrics)}

    def player(self) -> str:
        """Return the result of the calculator, a call, or an answer with or without a wrong digit."""
        if self.result is not None:
            return self.result
        if self.tool and self.player_random.random() < 0.3:
            return f"c{self.question.strip().rstrip('=')}"
        if self.player_random.random() < 0.5:
            return self.answer

        # Another digit in place of one of them.
        positions = [position for position, character in enumerate(self.answer) if character.isdigit()]
        position = int(self.player_random.choice(positions))
        digit = (int(self.answer[position]) + int(self.player_random.integers(1, 10))) % 10
        return f"{self.answer[:position]}{digit}{self.answer[position + 1 :]}"


def calculated(expression: str) -> int | None:
    """Return the value of an expression with +, - and *; None if it is no such expression.

    Examples:
        >>> calculated("2+3*4-5")
        9
        >>> calculated("2**3") is None
        True
    """
    if not _EXPRESSION.fullmatch(expression):
        return None

    # A sum of products; no text is evaluated as code.
    total = 0
    for sign, product in _SUMMAND.findall(expression):
        value = math.prod(int(factor) for factor in product.split("*"))
        total += -value if sign == "-" else value
    return total
