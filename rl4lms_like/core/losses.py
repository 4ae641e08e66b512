"""Terms of the losses, as pure functions over flat vectors `[n_actions]`. Losses are minimised.

    r = pi(a_t | s_t) / pi_old(a_t | s_t)      passed as log r, new minus old log-prob; pi_old: the rollout's policy
    A                                          advantage of the action, constant

Every function returns one number per action. `core.objective` defines how they are averaged.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rl4lms_like.core.kl_estimators import KL_ESTIMATORS

Correction = Literal["tis", "icepop", "sequence_mask"]


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, estimator: str = "k1") -> Tensor:
    """Estimate KL(policy ‖ reference) from single samples, one per token (Schulman, "Approximating KL divergence").

    With l = log_prob - ref_log_prob: k1 = l, k2 = l²/2, k3 = e^{-l} - 1 + l. k1 and k3 are unbiased estimates of the
    KL, k2 is biased. k2 and k3 are never negative.

    Raises:
        ValueError: there is no such estimator of single samples.

    Examples:
        >>> log_prob, ref_log_prob = torch.tensor([-1.0]), torch.tensor([-3.0])
        >>> [round(float(kl_estimate(log_prob, ref_log_prob, name)), 3) for name in ("k1", "k2", "k3")]
        [2.0, 2.0, 1.135]
    """
    of_samples = KL_ESTIMATORS[estimator].of_samples if estimator in KL_ESTIMATORS else None
    if of_samples is None:
        raise ValueError(f"{estimator} is not an estimator of single samples: use k1, k2 or k3")
    return of_samples(log_prob - ref_log_prob)  # [n_tokens]


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

    Examples:
        >>> log_ratio = torch.tensor([1.5, 1.5]).log()
        >>> [round(x, 3) for x in clipped_surrogate(log_ratio, torch.tensor([1.0, -1.0]), clip_range=0.2).tolist()]
        [-1.2, 1.5]
    """
    if clip_high is None:
        clip_high = clip_range
    ratio = torch.exp(log_ratio)  # r, [n_actions]

    # min(r A, clip(r, 1 - c, 1 + c') A): the smaller of both, so that leaving the range gains nothing.
    clipped = ratio.clamp(1 - clip_range, 1 + clip_high)
    gain = torch.min(ratio * advantages, clipped * advantages)

    # For A < 0 the minimum has no bound: r A falls without end as r grows. max(min(...), dual_clip A) has one.
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.max(gain, dual_clip * advantages), gain)
    return -gain


def surrogate(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Compute TRPO's policy loss, -r A (arXiv 1502.05477, eq. 14).

    Args:
        log_ratio: log r, new minus old log-prob.
        advantages: A.

    Examples:
        >>> surrogate(torch.tensor([0.0, 0.0]), torch.tensor([1.0, -2.0])).tolist()
        [-1.0, 2.0]
    """
    return -torch.exp(log_ratio) * advantages


def policy_gradient(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """Compute A2C's policy loss, -A log pi (arXiv 1602.01783).

    Examples:
        >>> policy_gradient(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -1.0])).tolist()
        [3.0, -2.0]
    """
    return -advantages * log_prob


def sequence_log_ratio(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    """Return the log of GSPO's sequence ratio, the mean of log r over a response, for each action (arXiv 2507.18071).

    Its gradient is that of the action's own log-prob (eq. 14), so that a mean over the actions of a response has the
    gradient of the sequence ratio.

    Args:
        log_ratio: `[n_actions]`, log r, new minus old log-prob.
        lengths: `[n]`, number of actions of each episode.

    Examples:
        >>> sequence_log_ratio(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 1])).tolist()
        [2.0, 2.0, 5.0]
    """
    # log s_{i,t} = sg[1/|y_i| sum_t log r_t] + log pi(a_t) - sg[log pi(a_t)]: the value is the mean, the gradient is
    # that of the action alone. Without the stop, an action's advantage would reach all actions of the response.
    return episode_means(log_ratio.detach(), lengths) + (log_ratio - log_ratio.detach())


def episode_means(field: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of a flat field `[n_actions]` over each episode, repeated for its actions `[n_actions]`."""
    # Episode of each action. The number of actions is known: to add it up, the process would wait for the device.
    row = torch.arange(len(lengths), device=field.device).repeat_interleave(lengths, output_size=len(field))
    sums = torch.zeros(len(lengths), dtype=field.dtype, device=field.device).index_add(0, row, field)  # [n]
    return (sums / lengths.clamp_min(1))[row]


def geometric_mean_surrogate(log_ratio: Tensor, advantages: Tensor, lengths: Tensor, low: float, high: float) -> Tensor:
    """Compute GMPO's policy loss, -A times the geometric mean of the clipped ratios of a response (arXiv 2507.20673).

    log r is limited to at most `high` where A is positive, and to at least `-low` where it is negative.

    Args:
        log_ratio: `[n_actions]`, log r, new minus old log-prob.
        advantages: `[n_actions]`, A.
        lengths: `[n]`, number of actions of each episode.
        low: clipping distance of log r below 0.
        high: clipping distance of log r above 0.

    Examples:
        >>> loss = geometric_mean_surrogate(torch.tensor([0.2, 2.0]), torch.ones(2), torch.tensor([2]), 0.4, 0.4)
        >>> [round(x, 3) for x in loss.tolist()]  # -exp((0.2 + 0.4) / 2)
        [-1.35, -1.35]
    """
    # -A exp(1/|y| sum_t clip(log r_t)). Clipped before the mean: one large ratio does not move that of the response.
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    return -torch.exp(episode_means(clipped, lengths)) * advantages


def cispo(log_prob: Tensor, log_ratio: Tensor, advantages: Tensor, max_ratio: float) -> Tensor:
    """Compute CISPO's policy loss, -min(r, max_ratio) A log pi, with a constant ratio (arXiv 2506.13585, eq. 4).

    All actions have a gradient, also those whose ratio is limited.

    Examples:
        >>> log_prob, log_ratio = torch.tensor([-2.0]), torch.tensor([9.0]).log()
        >>> cispo(log_prob, log_ratio, torch.tensor([1.0]), max_ratio=5.0).tolist()
        [10.0]
    """
    # -sg[min(r, max_ratio)] A log pi: the ratio is a weight, so its limit does not cut off the gradient of log pi.
    return -log_ratio.detach().exp().clamp(max=max_ratio) * advantages * log_prob


def cpgd(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Compute CPGD's policy loss without its drift, -min(A log r, A clip(log r)) (arXiv 2505.12504, eq. 6).

    The gradient of an action that is not clipped is -A times that of its log-prob, without the ratio.

    Args:
        log_ratio: log r, new minus old log-prob.
        advantages: A.
        low: clipping distance of r below 1; less than 1.
        high: clipping distance of r above 1.

    Examples:
        >>> loss = cpgd(torch.tensor([0.1, 9.0]), torch.tensor([2.0, 2.0]), 0.2, 0.2)
        >>> [round(x, 3) for x in loss.tolist()]
        [-0.2, -0.365]
    """
    # The limits are those of r, as in PPO: log(1 - low) and log(1 + high).
    clipped = log_ratio.clamp(math.log1p(-low), math.log1p(high))
    return -torch.min(log_ratio * advantages, clipped * advantages)


def policy_drift(log_ratio: Tensor) -> Tensor:
    """Estimate KL(old policy ‖ new policy) of each action, r - 1 - log r; the drift of CPGD (arXiv 2505.12504).

    Examples:
        >>> policy_drift(torch.tensor([0.0])).tolist()
        [0.0]
    """
    # Estimator k3 with samples of the old policy. It is never negative, and 0 at r = 1 with gradient 0.
    return torch.exp(log_ratio) - 1 - log_ratio


def correction_weights(log_ratio: Tensor, lengths: Tensor, kind: Correction, low: float, high: float) -> Tensor:
    """Compute weights that correct for actions sampled from another distribution than the one that is trained.

        tis             w limited to [low, high]                            (truncated importance sampling)
        icepop          w where it is in [low, high], else 0                (arXiv 2510.18855)
        sequence_mask   w where the geometric mean of the response's w is in [low, high], else 0

    Args:
        log_ratio: `[n_actions]`, log w: log-prob in the rollout, minus that under the sampled distribution.
        lengths: `[n]`, number of actions of each episode.
        kind: see above.
        low: lower limit.
        high: upper limit.

    Returns:
        `[n_actions]`, without gradient.

    Examples:
        >>> log_ratio = torch.tensor([0.5, 1.0, 4.0]).log()
        >>> correction_weights(log_ratio, torch.tensor([3]), "tis", 0.0, 2.0).tolist()
        [0.5, 1.0, 2.0]
        >>> correction_weights(log_ratio, torch.tensor([3]), "icepop", 0.8, 2.0).tolist()
        [0.0, 1.0, 0.0]
    """
    weights = log_ratio.detach().exp()  # w = pi_old / mu, [n_actions]
    if kind == "tis":
        return weights.clamp(low, high)

    # What must be in [low, high]: w_t of the action, or (prod_t w_t)^(1 / |y|) of the whole response.
    compared = weights
    if kind == "sequence_mask":
        compared = episode_means(log_ratio.detach(), lengths).exp()
    return weights.where((compared >= low) & (compared <= high), 0.0)


def effective_sample_size(weights: Tensor) -> float:
    """Return (sum of w)² / (n times the sum of w²), from 1/n to 1: the fraction of `n` samples that count.

    Examples:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 0.0, 0.0]))
        0.5
    """
    weights = weights.double()
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def value_error(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip_range: float | None = None
) -> Tensor:
    """Compute the critic's squared error as in Stable-Baselines3: no factor 1/2, and no maximum if clipped.

    Args:
        values: the critic's predictions.
        returns: targets of the critic.
        old_values: the critic's predictions before the update; required with `clip_range`.
        clip_range: keep `values` within this distance of `old_values`.

    Examples:
        >>> value_error(torch.tensor([3.0]), torch.tensor([1.0])).tolist()
        [4.0]
        >>> value_error(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0]), clip_range=0.5).tolist()
        [2.25]
    """
    # V_clipped = V_old + clip(V - V_old, -c, c)
    if clip_range is not None and old_values is not None:
        values = old_values + (values - old_values).clamp(-clip_range, clip_range)

    return (values - returns).square()


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Estimate the KL from the rollout's policy to the updated one: the mean of r - 1 - log r.

    Examples:
        >>> round(float(approximate_kl(torch.tensor([0.0, 1.0]))), 3)
        0.359
    """
    return policy_drift(log_ratio).mean()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns); nan where all returns are equal.

    Examples:
        >>> round(explained_variance(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0])), 3)
        0.667
    """
    # 1: the values are the returns up to a constant. 0: no better than a constant. Below 0: worse than that.
    variance = returns.var(unbiased=False)
    if variance == 0:
        return float("nan")
    return float(1 - (returns - values).var(unbiased=False) / variance)
