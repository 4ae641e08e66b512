"""Advantages from per-token rewards and values. Pure functions over padded matrices `[n, length]` with a mask."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING_UNITS = 8
"""Standard deviations up to this multiple of the dtype's epsilon (times the size of the numbers) are rounding error."""


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) within each row.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lambda A_{t+1}
        returns = A + V

    Tokens outside the mask are no time steps: they are skipped, wherever they stand.

    Args:
        rewards: `[n, length]`.
        values: `[n, length]`.
        mask: `[n, length]`, True = an action of the policy.
        gamma: discount.
        gae_lambda: lambda.
        last_values: `[n]`, the value after each row's last token; default 0, the episode ended there.

    Returns:
        Advantages and returns `[n, length]`, 0 outside the mask.
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


def normalized(advantages: Tensor, returns: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1, as Stable-Baselines3 computes them.

    `(A - mean) / (std + eps)` with the unbiased std. A single advantage is returned as it is: it has no spread.

    Advantages that differ by rounding errors only (one episode with gamma = lambda = 1 and a constant value, or a
    rollout in which all rewards are equal) carry no information. Dividing by their std would turn rounding errors into
    advantages of size 1, so zeros are returned instead.

    Args:
        advantages: `[n_actions]`.
        returns: `[n_actions]`, `advantages + values`. Where values are much larger than advantages, the rounding error
            of the difference is that of the larger numbers.
        eps: added to the std.
    """
    if advantages.numel() < 2:
        return advantages
    std = advantages.std()
    size = advantages.abs().max() if returns is None else torch.maximum(advantages.abs().max(), returns.abs().max())
    rounding = ROUNDING_UNITS * torch.finfo(advantages.dtype).eps * size
    return torch.where(std <= rounding, 0.0, (advantages - advantages.mean()) / (std + eps))  # NaN stays NaN


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-8, unbiased: bool = True) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over the mask; 0 outside of it.

    Args:
        values: any shape.
        mask: of the same shape.
        eps: added to the variance.
        unbiased: divide the squares by n - 1.
    """
    chosen = values[mask.bool()]
    variance = chosen.var(unbiased=unbiased) if chosen.numel() > 1 else chosen.new_zeros(())
    return torch.where(mask.bool(), (values - chosen.mean()) * torch.rsqrt(variance + eps), 0.0)
