"""Toy scores that need no model and no references: increasing numbers, dates."""

from __future__ import annotations

import math
import re

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def increasing_numbers(text: str, min_tokens: int) -> float:
    """Return how much of a text consists of increasing numbers, from 0 to 1 (RL4LMs' definition).

    `k / max(n_tokens, min_tokens / 2)`, where tokens are separated by whitespace and `k` is the length of the strictly
    increasing run that starts at the first number and ends before the first number that is not larger. Other tokens in
    between do not end the run. Numbers are the finite values that `float` accepts; unlike in RL4LMs, `nan`, `inf` and
    `1e999` are not numbers.
    """
    tokens = text.split()
    run_length = 0
    largest = -math.inf
    for number in filter(math.isfinite, map(_number, tokens)):
        if number <= largest:
            break
        run_length += 1
        largest = number

    # The minimum keeps a text of one number from a full score. An empty text would be 0 / 0 with `min_tokens` 0.
    return run_length / max(len(tokens), min_tokens / 2) if run_length else 0.0


def has_date(text: str) -> float:
    """Return 1 if the text contains a date like `2022-10-04`, else 0."""
    return 1.0 if _DATE.search(text) else 0.0


def _number(token: str) -> float:
    try:
        return float(token)
    except ValueError:
        return math.nan
