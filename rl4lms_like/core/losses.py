"""The formulas. Pure functions over flat vectors `[n_actions]`: the terms of losses, which are minimised.

How the terms are averaged: `core.objective`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Single-sample estimates of KL(policy ‖ reference), one per token (Schulman, "Approximating KL divergence").

    With l = log_prob - ref_log_prob: k1 = l, k2 = l²/2, k3 = e^{-l} - 1 + l. The mean of k1 and of k3 is the KL; k2 is
    biased and never negative, like k3.
    """
    log_ratio = log_prob - ref_log_prob
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.exp(-log_ratio) - 1 + log_ratio


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_range: float, clip_high: float | None = None
) -> Tensor:
    """PPO's policy loss, -min(r A, clip(r, 1 - clip_range, 1 + clip_high) A) (arXiv 1707.06347, eq. 7).

    Args:
        log_ratio: log of r, new minus old log-prob.
        advantages: A.
        clip_range: distance below 1.
        clip_high: distance above 1; default: the same.
    """
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range if clip_high is None else clip_high))
    return -torch.min(ratio * advantages, clipped * advantages)


def surrogate(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """TRPO's policy loss, -r A (arXiv 1502.05477, eq. 14).

    Args:
        log_ratio: log of r, new minus old log-prob.
        advantages: A.
    """
    return -torch.exp(log_ratio) * advantages


def policy_gradient(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """The actor's loss of A2C, -A log pi (arXiv 1602.01783)."""
    return -advantages * log_prob


def value_error(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Squared error of the critic as in Stable-Baselines3: no factor 1/2, and no maximum if clipped.

    Args:
        values: the critic's.
        returns: its targets.
        old_values: the critic's before the update; needed with `clip_range`.
        clip_range: keep `values` within this distance of `old_values`.
    """
    if clip_range is not None and old_values is not None:
        values = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return (values - returns).square()


def clipped_value_error(values: Tensor, returns: Tensor, old_values: Tensor, clip_range: float) -> Tensor:
    """The value loss of PPO's own code, ½ max((V - R)², (clip(V, V_old ± c) - R)²)."""
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return torch.max((values - returns).square(), (clipped - returns).square()) / 2


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """How far an update has moved from the rollout's policy: mean of r - 1 - log r."""
    return (torch.exp(log_ratio) - 1 - log_ratio).mean()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); nan where all returns are equal."""
    variance = returns.var(unbiased=False)
    return float("nan") if variance == 0 else float(1 - (returns - values).var(unbiased=False) / variance)
