"""The chance that at least one of k samples is right: the unbiased estimator of Chen et al. 2021, arXiv 2107.03374."""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), their eq. 1, as a product that no size of n makes overflow.

    Args:
        n: samples of one prompt.
        c: right ones among them.
        k: how many may be tried.

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
    """The places at which each text stands."""
    groups: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        groups.setdefault(text, []).append(place)
    return groups
