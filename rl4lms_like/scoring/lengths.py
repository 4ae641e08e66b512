"""Penalties for a response's length and repetitions.

length_penalty       0 up to `max_length`, then `penalty` for each further unit, down to `min_reward`
soft_overlong        0, then linear to -1 at the length limit (DAPO)
repetition_penalty   the fraction of repeated n-grams, times `max_penalty`
"""

from __future__ import annotations

from typing import Literal

Unit = Literal["tokens", "words", "characters"]


def length_of(text: str, unit: Unit) -> int:
    """Return the number of words (separated by white space) or characters of a text."""
    return len(text.split()) if unit == "words" else len(text)


def length_penalty(length: int, *, max_length: int, penalty: float, min_reward: float) -> float:
    """Return the penalty for a length.

    Args:
        length: length of the response.
        max_length: maximum length without a penalty.
        penalty: penalty for each further unit.
        min_reward: minimum of the result; at most 0.
    """
    return max(min_reward, 0.0 - penalty * max(0, length - max_length))


def soft_overlong(length: int, *, max_length: int, cache: int) -> float:
    """Return DAPO's soft overlong punishment, from 0 to -1 (arXiv 2503.14476, eq. 13).

    Args:
        length: L, number of tokens of the response.
        max_length: L_max.
        cache: L_cache. The result is 0 up to L_max - L_cache, ((L_max - L_cache) - L) / L_cache up to L_max, else -1.
    """
    free = max_length - cache
    if length <= free:
        return 0.0
    return (free - length) / cache if length <= max_length else -1.0


def repetition_penalty(text: str, *, ngram_size: int, max_penalty: float) -> float:
    """Return `max_penalty` times the fraction of a text's n-grams that occurred earlier in it, as in open-r1.

    Args:
        text: the response; words are separated by white space and lower-cased.
        ngram_size: n; a text of fewer words has no n-grams and no penalty.
        max_penalty: the limit of the penalty; at most 0.
    """
    words = text.lower().split()
    n_grams = len(words) - ngram_size + 1
    if n_grams <= 0:
        return 0.0
    distinct = len(set(zip(*(words[start:] for start in range(ngram_size)), strict=False)))
    return (1 - distinct / n_grams) * max_penalty + 0.0
