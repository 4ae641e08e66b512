"""Losses of preference training, as pure functions; one number per pair or per labelled response, to be minimised.

    chosen, rejected    `[n]`, scores of the two responses of each pair

The score of a response is, by objective:

    log-ratio           sum over its tokens of log pi - log pi_ref       dpo, kto, ipo (or the mean)
    mean log-prob       mean over its tokens of log pi                   orpo, simpo
    reward              output of the reward model                       reward_model

The reward that a log-ratio implies is beta times the log-ratio.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LN_2 = math.log(2)


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """Compute -log sigmoid(r_c - r_r - margin) + center_coef (r_c + r_r)².

    The first term is the negative log-likelihood of the preference in the model of Bradley and Terry, with the margin
    of Llama 2 (arXiv 2307.09288, eq. 2). The second one keeps rewards centred at 0 (arXiv 2312.09244).

    Examples:
        >>> round(float(bradley_terry_loss(torch.tensor(1.0), torch.tensor(0.0))), 3)
        0.313
        >>> round(float(bradley_terry_loss(torch.tensor(1.0), torch.tensor(0.0), margin=1.0, center_coef=0.5)), 3)
        1.193
    """
    return -logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Compute -log sigmoid(beta (l_c - l_r)) (DPO, arXiv 2305.18290, eq. 7).

    `label_smoothing` is the probability that the labels of a pair are swapped: the expected loss under such labels
    (conservative DPO, Mitchell, "A note on DPO with noisy preferences", 2023).

    Examples:
        >>> round(float(dpo_loss(torch.tensor(0.0), torch.tensor(0.0), beta=0.1)), 4)  # ln 2
        0.6931
    """
    # -(1 - ε) log sigmoid(beta (l_c - l_r)) - ε log sigmoid(beta (l_r - l_c))
    difference = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)


def robust_dpo_loss(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Compute the loss whose mean over labels swapped with this probability is that of DPO (arXiv 2403.00409, eq. 12).

    Examples:
        >>> l_c, l_r = torch.tensor(5.0), torch.tensor(0.0)
        >>> right, swapped = robust_dpo_loss(l_c, l_r, 1.0, 0.1), robust_dpo_loss(l_r, l_c, 1.0, 0.1)
        >>> bool(torch.isclose(0.9 * right + 0.1 * swapped, dpo_loss(l_c, l_r, 1.0)))
        True
    """
    # L = ((1 - ε) L_right - ε L_swapped) / (1 - 2ε). With labels swapped at rate ε, the mean of L is that of L_right
    # without noise: its terms in L_swapped cancel.
    difference = beta * (chosen - rejected)
    right = logsigmoid(difference)
    swapped = logsigmoid(-difference)
    return -((1 - label_smoothing) * right - label_smoothing * swapped) / (1 - 2 * label_smoothing)


def hinge_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute max(0, 1 - beta (l_c - l_r)) (SLiC as in arXiv 2309.06657, eq. 11).

    Examples:
        >>> hinge_loss(torch.tensor([4.0, 30.0]), torch.tensor([0.0, 0.0]), beta=0.1).tolist()
        [0.6000000238418579, 0.0]
    """
    return torch.relu(1 - beta * (chosen - rejected))


def ipo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Compute (l_c - l_r - 1 / (2 beta))² (IPO, arXiv 2310.12036, eq. 17).

    In the paper, a log-ratio is the sum over the tokens of a response. Common implementations use the mean.

    Examples:
        >>> ipo_loss(torch.tensor(5.0), torch.tensor(0.0), beta=0.1).item()
        0.0
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto_reference_point(mismatched: Tensor) -> Tensor:
    """Estimate z0 = max(0, KL(policy ‖ reference)) from log-ratios of responses to other prompts (KTO, section 4.1).

    It has no gradient.

    Args:
        mismatched: `[n]`, log-ratios of responses, given the prompt of another one.

    Examples:
        >>> kto_reference_point(torch.tensor([0.5, -0.1])).item(), kto_reference_point(torch.tensor([-1.0])).item()
        (0.20000000298023224, 0.0)
    """
    # The limit holds for the mean, not for each response: a mean of clipped log-ratios would be too large.
    return mismatched.detach().mean().clamp_min(0.0)


def kto_loss(log_ratio: Tensor, is_desirable: Tensor, reference_point: Tensor | float, beta: float) -> Tensor:
    """Compute 1 - sigmoid(beta (l - z0)) for desirable responses, 1 - sigmoid(beta (z0 - l)) for others.

    This is KTO (arXiv 2402.01306, eq. 8), without the weights of the two classes.

    Args:
        log_ratio: `[n]`, l.
        is_desirable: `[n]`, bool.
        reference_point: z0, see `kto_reference_point`.
        beta: weight of the log-ratio.

    Examples:
        >>> kto_loss(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), 1.0, beta=0.1).tolist()
        [0.5, 0.5]
    """
    # sigmoid(-gain) is that of beta (z0 - l).
    gain = beta * (log_ratio - reference_point)
    return 1 - torch.where(is_desirable, gain, -gain).sigmoid()


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute log(odds(p_c) / odds(p_r)) with odds(p) = p / (1 - p), from mean log-probs (ORPO, eq. 4).

    Examples:
        >>> log_p = torch.tensor([0.8, 0.5]).log()
        >>> round(float(log_odds_ratio(log_p[0], log_p[1])), 3)  # log(4 / 1)
        1.386
    """
    # log p - log(1 - p) of both, from m = log p.
    return (chosen - rejected) - (log_of_complement(chosen) - log_of_complement(rejected))


def log_of_complement(log_p: Tensor) -> Tensor:
    """Compute log(1 - p) from log p, with p limited to at most 1 - eps, eps the precision of the data type.

    The value is at least log eps and the gradient at most 1 / eps, also where p is rounded to 1.

    Examples:
        >>> [round(x, 3) for x in log_of_complement(torch.tensor([0.5, 1.0]).log()).tolist()]
        [-0.693, -15.942]
    """
    # log(1 - p) = log1p(-e^m) is exact for small p, log(-expm1(m)) for p near 1, where 1 - e^m cancels (Mächler,
    # "Accurately computing log(1 - exp(-|a|))", 2012). Each form gets arguments of its own range only: at m = 0 the
    # gradient of the form that `where` does not choose would be 0 times infinity.
    limited = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    of_small = torch.log1p(-limited.clamp(max=-LN_2).exp())
    of_large = torch.log(-torch.expm1(limited.clamp(min=-LN_2)))
    return torch.where(limited < -LN_2, of_small, of_large)


def orpo_loss(chosen: Tensor, rejected: Tensor, nll: Tensor, weight: float) -> Tensor:
    """Compute nll - weight log sigmoid(log odds ratio) (ORPO, arXiv 2403.07691, eq. 6 and 7).

    Args:
        chosen: `[n]`, mean log-probs of chosen responses.
        rejected: `[n]`, mean log-probs of rejected responses.
        nll: `[n]`, negative log-likelihood of chosen responses; in the paper, `-chosen`.
        weight: lambda.

    Examples:
        >>> round(float(orpo_loss(torch.tensor(-1.0), torch.tensor(-1.0), torch.tensor(1.0), weight=1.0)), 3)
        1.693
    """
    return nll - weight * logsigmoid(log_odds_ratio(chosen, rejected))


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """Compute -log sigmoid(beta (m_c - m_r) - gamma), with mean log-probs m (SimPO, arXiv 2405.14734, eq. 6).

    Examples:
        >>> round(float(simpo_loss(torch.tensor(-1.0), torch.tensor(-1.5), beta=2.0, gamma=1.0)), 4)
        0.6931
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma)
