"""Probability that at least one of k samples is right: unbiased estimator of Chen et al. 2021, arXiv 2107.03374."""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k), their eq. 1, as a product that does not overflow for large n.

    Args:
        n: number of samples of one prompt.
        c: number of right samples among them.
        k: number of attempts.

    Raises:
        ValueError: there are fewer than k samples.
    """
    if n < k:
        raise ValueError(f"pass@{k} needs at least {k} samples of a prompt, got {n}")
    if n - c < k:
        return 1.0
    all_wrong = 1.0
    for i in range(n - c + 1, n + 1):
        all_wrong *= 1 - k / i
    return 1.0 - all_wrong


def groups_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices at which each text occurs."""
    groups: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        groups.setdefault(text, []).append(place)
    return groups
