"""What a response's length and repetitions cost.

length_penalty       0 up to `max_length`, then a price for each unit more, down to `min_reward`
soft_overlong        0, then a straight line to -1, the length limit at its end (DAPO)
repetition_penalty   the share of n-grams that are there already, times `max_penalty`
"""

from __future__ import annotations

from typing import Literal

Unit = Literal["tokens", "words", "characters"]


def length_of(text: str, unit: Unit) -> int:
    """Words (between white space) or characters of a text."""
    return len(text.split()) if unit == "words" else len(text)


def length_penalty(length: int, *, max_length: int, penalty: float, min_reward: float) -> float:
    """What a length costs.

    Args:
        length: of the response.
        max_length: what is free.
        penalty: the price of each unit more.
        min_reward: it never costs more than that; at most 0.
    """
    return max(min_reward, 0.0 - penalty * max(0, length - max_length))


def soft_overlong(length: int, *, max_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment, from 0 to -1 (arXiv 2503.14476, eq. 13).

    Args:
        length: L, tokens of the response.
        max_length: L_max.
        cache: L_cache; 0 up to L_max - L_cache, ((L_max - L_cache) - L) / L_cache up to L_max, -1 beyond.
    """
    free = max_length - cache
    if length <= free:
        return 0.0
    return (free - length) / cache if length <= max_length else -1.0


def repetition_penalty(text: str, *, ngram_size: int, max_penalty: float) -> float:
    """`max_penalty` times the share of a text's n-grams that occurred before in it, as open-r1 has it.

    Args:
        text: the response; words are what stands between white space, in lower case.
        ngram_size: n; a text of fewer words has no n-grams, and costs nothing.
        max_penalty: at most 0.
    """
    words = text.lower().split()
    n_grams = len(words) - ngram_size + 1
    if n_grams <= 0:
        return 0.0
    distinct = len(set(zip(*(words[start:] for start in range(ngram_size)), strict=False)))
    return (1 - distinct / n_grams) * max_penalty + 0.0
