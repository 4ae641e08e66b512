"""Estimators of KL(policy ‖ reference), and the placements of the penalty that each fits.

    l = log pi(a) - log ref(a)     of the sampled token a: the single-sample estimators read only this
    pi(. | s), ref(. | s)          `top_k` and `full` read both distributions; see `core.token_scores.vocabulary_kl`

To add an estimator of samples, add its name to `Estimator` and its row to `KL_ESTIMATORS`. One of distributions also
needs a branch in `LMActorCriticPolicy.reference_kl`. Whatever the estimator of the penalty, the log and the controllers
of the coefficient use k1. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Placement = Literal["reward", "advantage", "loss"]
Estimator = Literal["k1", "k2", "k3", "top_k", "full"]


@dataclass(frozen=True)
class KLEstimator:
    """An estimator of the KL.

    Args:
        of_samples: estimate `[n]` from the log-ratios l `[n]` of sampled tokens; None = it needs both distributions.
        refused: placement -> why the estimator must not be used there, with the way out.
    """

    of_samples: Callable[[Tensor], Tensor] | None
    refused: Mapping[Placement, str] = field(default_factory=dict)


def k1(log_ratio: Tensor) -> Tensor:
    """Return l: samples are of the policy, so E[l] is the KL itself; but single values are often negative."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return l² / 2: biased, never negative; its gradient is that of the KL."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return e^{-l} - 1 + l: never negative; the mean of e^{-l} - 1 is 0, so it is unbiased, with less noise."""
    return (-log_ratio).exp() - 1 + log_ratio


def _is_a_loss(name: str) -> str:
    return f"{name} is a term of the loss with a gradient of its own: use placement: loss"


def _not_in_advantage(name: str) -> str:
    return f"{name} in the advantage does not have the gradient of the KL: use k1"


# In the loss, the gradient of k1 is E[grad log pi] = 0. In the advantage, the score function multiplies the estimate,
# so only k1 gives the gradient of the KL. A reward may have any estimate of the sampled token.
KL_ESTIMATORS: dict[str, KLEstimator] = {
    "k1": KLEstimator(k1, {"loss": "k1 in the loss has an expected gradient of 0: use another estimator or placement"}),
    "k2": KLEstimator(k2, {"advantage": _not_in_advantage("k2")}),
    "k3": KLEstimator(k3, {"advantage": _not_in_advantage("k3")}),
    "top_k": KLEstimator(None, {"reward": _is_a_loss("top_k"), "advantage": _is_a_loss("top_k")}),
    "full": KLEstimator(None, {"reward": _is_a_loss("full"), "advantage": _is_a_loss("full")}),
}
"""All estimators, by their names in `alg.kl_div.estimator` (Schulman, "Approximating KL divergence", for k1 to k3)."""


WITH_DISTRIBUTIONS = tuple(name for name, row in KL_ESTIMATORS.items() if row.of_samples is None)
"""Estimators that need the distributions of policy and reference, not only the log-probs of the sampled tokens."""


def estimator_error(placement: Placement, estimator: str | None, top_k: int | None = None) -> str | None:
    """Return the error for an estimator that does not fit its placement; None if it fits.

    Args:
        placement: of the penalty.
        estimator: a name in `KL_ESTIMATORS`; None = the placement's default, which fits.
        top_k: number of tokens of the estimator `top_k`, if it is set.

    Examples:
        >>> estimator_error("loss", "full") is None, estimator_error("reward", "full") is None
        (True, False)
    """
    if estimator is not None:
        if estimator not in KL_ESTIMATORS:
            return f"{estimator} is not an estimator of the KL: use {', '.join(KL_ESTIMATORS)}"
        if placement in KL_ESTIMATORS[estimator].refused:
            return KL_ESTIMATORS[estimator].refused[placement]
    if top_k is not None and estimator != "top_k":
        return "top_k has no effect without estimator: top_k"
    return None
