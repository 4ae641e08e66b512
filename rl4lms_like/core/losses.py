"""Terms of the losses, as pure functions over flat vectors `[n_actions]`. Losses are minimised.

`core.objective` defines how the terms are averaged.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Estimate KL(policy ‖ reference) from single samples, one per token (Schulman, "Approximating KL divergence").

    With l = log_prob - ref_log_prob: k1 = l, k2 = l²/2, k3 = e^{-l} - 1 + l. k1 and k3 are unbiased estimates of the
    KL, k2 is biased. k2 and k3 are never negative.

    Example:
        >>> log_prob, ref_log_prob = torch.tensor([-1.0]), torch.tensor([-3.0])
        >>> [round(float(kl_estimate(log_prob, ref_log_prob, name)), 3) for name in ("k1", "k2", "k3")]
        [2.0, 2.0, 1.135]
    """
    log_ratio = log_prob - ref_log_prob
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.exp(-log_ratio) - 1 + log_ratio


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_range: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute PPO's policy loss, -min(r A, clip(r, 1 - clip_range, 1 + clip_high) A) (arXiv 1707.06347, eq. 7).

    With `dual_clip`, the loss of a negative advantage is at most -dual_clip A (arXiv 1912.09729, eq. 5), so that a
    large ratio does not dominate the gradient.

    Args:
        log_ratio: log r, new minus old log-prob.
        advantages: A.
        clip_range: clipping distance below 1.
        clip_high: clipping distance above 1; default: `clip_range`.
        dual_clip: largest ratio of actions with a negative advantage, above 1; default: no limit.

    Example:
        >>> log_ratio = torch.tensor([1.5, 1.5]).log()
        >>> [round(x, 3) for x in clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0]), clip_range=0.2).tolist()]
        [-1.2, 1.5]
    """
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range if clip_high is None else clip_high))
    gain = torch.min(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.max(gain, dual_clip * advantages), gain)
    return -gain


def surrogate(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Compute TRPO's policy loss, -r A (arXiv 1502.05477, eq. 14).

    Args:
        log_ratio: log r, new minus old log-prob.
        advantages: A.

    Example:
        >>> surrogate(torch.tensor([0.0, 0.0]), torch.tensor([1.0, -2.0])).tolist()
        [-1.0, 2.0]
    """
    return -torch.exp(log_ratio) * advantages


def policy_gradient(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """Compute A2C's policy loss, -A log pi (arXiv 1602.01783).

    Example:
        >>> policy_gradient(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -1.0])).tolist()
        [3.0, -2.0]
    """
    return -advantages * log_prob


def value_error(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Compute the critic's squared error as in Stable-Baselines3: no factor 1/2, and no maximum if clipped.

    Args:
        values: the critic's predictions.
        returns: targets of the critic.
        old_values: the critic's predictions before the update; required with `clip_range`.
        clip_range: keep `values` within this distance of `old_values`.

    Example:
        >>> value_error(torch.tensor([3.0]), torch.tensor([1.0])).tolist()
        [4.0]
        >>> value_error(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0]), clip_range=0.5).tolist()
        [2.25]
    """
    if clip_range is not None and old_values is not None:
        values = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return (values - returns).square()


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Estimate the KL from the rollout's policy to the updated one: the mean of r - 1 - log r.

    Example:
        >>> round(float(approximate_kl(torch.tensor([0.0, 1.0]))), 3)
        0.359
    """
    return (torch.exp(log_ratio) - 1 - log_ratio).mean()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns); nan where all returns are equal.

    Example:
        >>> round(explained_variance(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])), 3)
        0.667
    """
    variance = returns.var(unbiased=False)
    return float("nan") if variance == 0 else float(1 - (returns - values).var(unbiased=False) / variance)
