"""Advantages from per-token rewards and values. Pure functions over padded matrices `[n, length]` with a mask."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Scale = Literal["group", "batch", "mean", "whiten", "none"]

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

    Examples:
        >>> rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[True, False, True]])
        >>> advantages, returns = generalized_advantages(rewards, torch.zeros(1, 3), mask, gamma=0.5, gae_lambda=1.0)
        >>> advantages.tolist()
        [[0.5, 0.0, 1.0]]
    """
    mask = mask.bool()
    advantages = torch.zeros_like(rewards)
    returns = torch.zeros_like(rewards)

    # V_{t+1} and A_{t+1} of each row `[n]`, from the last token backwards. Nothing follows the last token but its
    # value.
    next_value = torch.zeros_like(rewards[:, 0])
    if last_values is not None:
        next_value = last_values.to(rewards)
    advantage = torch.zeros_like(next_value)

    for t in reversed(range(rewards.shape[1])):
        # delta_t = r_t + gamma V_{t+1} - V_t, and A_t = delta_t + gamma lambda A_{t+1}. A token that is no action
        # leaves both as they are, so that the actions before and after it are neighbours.
        is_action = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(is_action, delta + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(is_action, values[:, t], next_value)

        advantages[:, t] = torch.where(is_action, advantage, 0.0)
        returns[:, t] = torch.where(is_action, advantage + values[:, t], 0.0)
    return advantages, returns


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return 1 - 1 / (alpha l) for episodes of l actions, at least 0 (VAPO, arXiv 2504.05118, eq. 8).

    Args:
        lengths: `[n]`, number of actions of each episode.
        alpha: the sum of the weights lambda^k of an episode's TD errors is about alpha l.

    Examples:
        >>> length_adaptive_lambda(torch.tensor([10, 40, 100]), alpha=0.05).tolist()
        [0.0, 0.5, 0.800000011920929]
    """
    # Below 1 / alpha actions the formula is negative: lambda = 0 is a one-step TD error.
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

    Examples:
        >>> normalized(torch.tensor([1.0, 2.0, 3.0])).tolist()
        [-1.0, 0.0, 1.0]
        >>> normalized(torch.tensor([2.0, 2.0])).tolist()
        [0.0, 0.0]
    """
    if advantages.numel() < 2:
        return advantages
    std = advantages.std()

    # A = returns - values: its rounding error has the size of the larger of the two, which may be much larger than A.
    size = advantages.abs().max()
    if returns is not None:
        size = torch.maximum(size, returns.abs().max())
    rounding = ROUNDING_UNITS * torch.finfo(advantages.dtype).eps * size

    # A NaN is not `<=` anything: it stays NaN, and the step is refused.
    return torch.where(std <= rounding, 0.0, (advantages - advantages.mean()) / (std + eps))


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-8, unbiased: bool = True) -> Tensor:
    """Return `(x - mean) / sqrt(var + eps)` with the statistics of the masked entries; 0 outside the mask.

    Entries that differ only by rounding errors become 0, as in `normalized`.

    Args:
        values: any shape.
        mask: same shape as `values`.
        eps: added to the variance.
        unbiased: divide the sum of squares by n - 1 instead of n.

    Examples:
        >>> whitened(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([True, True, False]), unbiased=False).tolist()
        [-1.0, 1.0, 0.0]
    """
    masked = values[mask.bool()]
    variance = masked.new_zeros(())  # an unbiased variance of a single entry would be NaN
    if masked.numel() > 1:
        variance = masked.var(unbiased=unbiased)

    # Not `>`, so that a NaN stays NaN instead of becoming an advantage of 0.
    rounding = ROUNDING_UNITS * torch.finfo(values.dtype).eps * masked.abs().max()
    differs = ~(variance.sqrt() <= rounding)
    return torch.where(mask.bool() & differs, (values - masked.mean()) * torch.rsqrt(variance + eps), 0.0)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each action on `[n, length]`; 0 outside the mask.

    Examples:
        >>> returns_to_go(torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([[True, False, True]]), gamma=0.5).tolist()
        [[2.0, 0.0, 2.0]]
    """
    # With V = 0 and lambda = 1, delta_t = r_t and A_t = r_t + gamma A_{t+1}.
    zero_values = torch.zeros_like(rewards)
    returns, _ = generalized_advantages(rewards, zero_values, mask, gamma=gamma, gae_lambda=1.0)
    return returns


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "none",
    lengths: Tensor | None = None,
    eps: float = 1e-4,
) -> Tensor:
    """Compare the reward of each episode with those of its group, the responses to the same prompt.

        baseline   mean              mean of the group                                      (GRPO, arXiv 2402.03300)
                   leave_one_out     mean of the other episodes of the group                (RLOO, arXiv 2402.14740)
                   length_weighted   mean of the group, weighted with the numbers of tokens (OPO, arXiv 2505.23585)
        scale      group             / (standard deviation of the group + eps)              (GRPO)
                   batch             / (standard deviation of all rewards + eps)
                   mean              / mean of the group, 0 if that is 0                    (MaxRL, arXiv 2602.02710)

    Other values of `baseline` and `scale` have no effect here. Standard deviations are unbiased. The advantages of a
    group whose rewards differ only by rounding errors are 0.

    Args:
        rewards: `[n]`, total reward of each episode.
        groups: `[n]`, equal for episodes of one group.
        baseline: what is subtracted.
        scale: what the difference is divided by.
        lengths: `[n]`, number of actions of each episode; required for `length_weighted`.
        eps: added to standard deviations.

    Returns:
        `[n]`.

    Examples:
        >>> rewards, groups = torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
        >>> group_advantages(rewards, groups).tolist()
        [0.5, -0.5, 0.0, 0.0]
        >>> group_advantages(rewards, groups, baseline="leave_one_out").tolist()
        [1.0, -1.0, 0.0, 0.0]
    """
    n_groups, row = _numbered(groups)  # row: [n], from 0 to n_groups - 1

    def group_sum(values: Tensor) -> Tensor:
        """Return the sum over each episode's group `[n]`."""
        sums = torch.zeros(n_groups, dtype=rewards.dtype, device=rewards.device)
        return sums.index_add(0, row, values.to(rewards))[row]

    sizes = group_sum(torch.ones_like(rewards))  # G of each episode's group, [n]
    mean = group_sum(rewards) / sizes

    # b_i = 1/G sum_j R_j, or 1/(G - 1) sum_{j != i} R_j, or sum_j l_j R_j / sum_j l_j
    subtracted = mean
    if baseline == "none":
        subtracted = torch.zeros_like(mean)
    elif baseline == "leave_one_out":
        subtracted = (sizes * mean - rewards) / (sizes - 1).clamp_min(1)
    elif baseline == "length_weighted":
        assert lengths is not None, "the baseline length_weighted requires lengths"
        subtracted = group_sum(rewards * lengths) / group_sum(lengths)
    advantages = rewards - subtracted

    # The standard deviation is around the mean of the group, whatever the baseline: sqrt(1/(G - 1) sum_j (R_j -
    # mean)^2)
    if scale == "group":
        variance = group_sum((rewards - mean).square()) / (sizes - 1).clamp_min(1)
        advantages = advantages / (variance.sqrt() + eps)
    elif scale == "batch":
        advantages = advantages / (rewards.std() + eps)
    elif scale == "mean":
        advantages = torch.where(mean == 0, 0.0, advantages / mean)

    # Differences that are rounding errors carry no information, and a small standard deviation would make them large.
    # Without a baseline an advantage is the reward itself, not a difference.
    if baseline == "none":
        return advantages
    return torch.where(rewards_differ(rewards, groups), advantages, 0.0)


def rewards_differ(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return whether the rewards of each episode's group differ by more than rounding errors `[n]`, bool.

    Args:
        rewards: `[n]`, total reward of each episode.
        groups: `[n]`, equal for episodes of one group.

    Examples:
        >>> rewards_differ(torch.tensor([1.0, 0.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])).tolist()
        [True, True, False, False]
    """
    # Largest and smallest reward of each group `[n_groups]`; the zeros of `empty` do not count.
    n_groups, row = _numbered(groups)
    empty = torch.zeros(n_groups, dtype=rewards.dtype, device=rewards.device)
    high = empty.scatter_reduce(0, row, rewards, "amax", include_self=False)
    low = empty.scatter_reduce(0, row, rewards, "amin", include_self=False)

    # An error of rounding grows with the size of the rewards: 0.1 + 0.2 and 0.3 are equal here, and so are 1e6 times
    # both.
    rounding = ROUNDING_UNITS * torch.finfo(rewards.dtype).eps * torch.maximum(high.abs(), low.abs())
    return (high - low > rounding)[row]


def _numbered(groups: Tensor) -> tuple[int, Tensor]:
    """Return the number of groups, and the number of each episode's group, from 0 `[n]`."""
    ids, row = torch.unique(groups, return_inverse=True)
    return len(ids), row


def overlong_penalty(lengths: Tensor, max_length: int, buffer: float) -> Tensor:
    """Return DAPO's soft penalty of long responses `[n]`, from 0 to -1 (arXiv 2503.14476, eq. 13).

    Args:
        lengths: `[n]`, number of tokens of each response, with those of the environment.
        max_length: longest possible response.
        buffer: number of tokens below `max_length` over which the penalty grows.

    Examples:
        >>> overlong_penalty(torch.tensor([10, 16, 20]), max_length=20, buffer=5).tolist()
        [0.0, -0.20000000298023224, -1.0]
    """
    # 0 up to L_max - L_cache tokens, then (L_max - L_cache - |y|) / L_cache, which is -1 at L_max.
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)
