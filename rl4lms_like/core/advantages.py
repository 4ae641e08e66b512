"""Advantages from per-token rewards and values. Pure functions over padded matrices `[n, length]` with a mask."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING_UNITS = 8
"""A standard deviation up to this multiple of the dtype's epsilon times the largest magnitude is a rounding error."""


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates (arXiv 1506.02438) within each row.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lambda A_{t+1}
        returns = A + V

    Tokens outside the mask are not time steps. They are skipped at any position.

    Args:
        rewards: `[n, length]`.
        values: `[n, length]`.
        mask: `[n, length]`, True = an action of the policy.
        gamma: discount.
        gae_lambda: lambda; a tensor `[n]` has one value for each row.
        last_values: `[n]`, the value after each row's last token; default: 0, for episodes that ended there.

    Returns:
        Advantages and returns `[n, length]`, 0 outside the mask.

    Example:
        >>> rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[True, False, True]])
        >>> advantages, returns = generalized_advantages(rewards, torch.zeros(1, 3), mask, gamma=0.5, gae_lambda=1.0)
        >>> advantages.tolist()
        [[0.5, 0.0, 1.0]]
    """
    mask = mask.bool()
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0]) if last_values is None else last_values.to(rewards)
    advantage = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(here, delta + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, advantage, 0.0)
        returns[:, t] = torch.where(here, advantage + values[:, t], 0.0)
    return advantages, returns


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return 1 - 1 / (alpha l) for episodes of l actions, at least 0 (VAPO, arXiv 2504.05118, eq. 8).

    Args:
        lengths: `[n]`, number of actions of each episode.
        alpha: the sum of the weights lambda^k of an episode's TD errors is about alpha l.

    Example:
        >>> length_adaptive_lambda(torch.tensor([10, 40, 100]), alpha=0.05).tolist()
        [0.0, 0.5, 0.800000011920929]
    """
    return (1 - 1 / (alpha * lengths.clamp_min(1))).clamp_min(0.0)


def normalized(advantages: Tensor, returns: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1, as Stable-Baselines3 computes them.

    This is `(A - mean) / (std + eps)` with the unbiased standard deviation. A single advantage is returned unchanged.

    Advantages that differ only by rounding errors (one episode with gamma = lambda = 1 and a constant value, or a
    rollout in which all rewards are equal) carry no information. Dividing by their std would turn rounding errors into
    advantages of size 1, so zeros are returned instead.

    Args:
        advantages: `[n_actions]`.
        returns: `[n_actions]`, `advantages + values`. Where values are much larger than advantages, the rounding error
            of the advantages has the size of the values' rounding error.
        eps: added to the standard deviation.

    Example:
        >>> normalized(torch.tensor([1.0, 2.0, 3.0])).tolist()
        [-1.0, 0.0, 1.0]
        >>> normalized(torch.tensor([2.0, 2.0])).tolist()
        [0.0, 0.0]
    """
    if advantages.numel() < 2:
        return advantages
    std = advantages.std()
    size = advantages.abs().max() if returns is None else torch.maximum(advantages.abs().max(), returns.abs().max())
    rounding = ROUNDING_UNITS * torch.finfo(advantages.dtype).eps * size
    return torch.where(std <= rounding, 0.0, (advantages - advantages.mean()) / (std + eps))  # NaN stays NaN


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-8, unbiased: bool = True) -> Tensor:
    """Return `(x - mean) / sqrt(var + eps)` with the statistics of the masked entries; 0 outside the mask.

    Args:
        values: any shape.
        mask: same shape as `values`.
        eps: added to the variance.
        unbiased: divide the sum of squares by n - 1 instead of n.

    Example:
        >>> whitened(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([True, True, False]), unbiased=False).tolist()
        [-1.0, 1.0, 0.0]
    """
    chosen = values[mask.bool()]
    variance = chosen.var(unbiased=unbiased) if chosen.numel() > 1 else chosen.new_zeros(())
    return torch.where(mask.bool(), (values - chosen.mean()) * torch.rsqrt(variance + eps), 0.0)
