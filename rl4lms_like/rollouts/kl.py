"""Coefficient of the KL penalty in the reward or the loss, and its controllers.

task reward r_t  ─────────────┐
log_prob, ref_log_prob ─ kl_t ┴─ r_t - coeff * kl_t ─ advantages
                           └─ mean over the rollout ─ controller ─ new coeff: for this rollout's update (placements
                              advantage and loss), and for the rewards of the next rollout

This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from rl4lms_like.core.kl_estimators import Estimator, Placement, estimator_error

if TYPE_CHECKING:
    from torch import Tensor

CLIP = 0.2
"""Relative errors are clipped to this size (arXiv 1909.08593, section 2.2)."""
TOP_K = 64
"""Default number of tokens of the estimator `top_k`."""


class KLController(ABC):
    """Base class for KL coefficients that are updated after each rollout.

    Args:
        coeff: initial coefficient.
        target_kl: target KL of the controller, in its own unit; None if it has no target.
        estimator: single-sample estimate of the KL (k1, k2, k3), or the KL over the `top_k` most probable tokens or
            the `full` vocabulary; see `core.kl_estimators`. Default: k3 in the loss, else k1.
        max_coeff: the coefficient never exceeds this; None = no limit.
        placement: the penalty is subtracted from the `reward` of each token, or only from the token's own `advantage`,
            or is a term of the `loss`.
        top_k: number of tokens of the estimator `top_k`.

    Raises:
        ValueError: the estimator does not fit the placement.
    """

    def __init__(
        self,
        coeff: float,
        target_kl: float | None = None,
        *,
        estimator: Estimator | None = None,
        max_coeff: float | None = None,
        placement: Placement = "reward",
        top_k: int | None = None,
    ) -> None:
        if error := estimator_error(placement, estimator, top_k):
            raise ValueError(error)
        self.coeff = float(coeff if max_coeff is None else min(coeff, max_coeff))
        self.target_kl = target_kl
        self.estimator: Estimator = estimator or ("k3" if placement == "loss" else "k1")
        self.placement = placement
        self.top_k = (top_k or TOP_K) if estimator == "top_k" else None
        self.max_coeff = max_coeff

    @abstractmethod
    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Update the coefficient after a rollout.

        Args:
            kl: k1 of every token `[n_tokens]`.
            lengths: number of tokens of every episode `[n]`.
        """

    def _multiply(self, factor: float) -> None:
        self.coeff *= factor
        if self.max_coeff is not None:
            self.coeff = min(self.coeff, self.max_coeff)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during a run."""
        return {"coeff": self.coeff}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.coeff = state["coeff"]


class FixedKLController(KLController):
    """Constant coefficient."""

    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Leave the coefficient unchanged."""


class AdaptiveKLController(KLController):
    """Control the mean KL **per token** as RL4LMs does: coeff ← coeff (1 + gain · clip((KL - target) / target, ±0.2)).

    Args:
        coeff: initial coefficient.
        target_kl: in nats per token.
        gain: K_beta of arXiv 1909.08593; 0.1 changes the coefficient by at most 2 % per iteration.
        limits: further arguments, see `KLController`.
    """

    target_kl: float

    def __init__(self, coeff: float, target_kl: float, *, gain: float = 0.1, **limits: Any) -> None:
        super().__init__(coeff, target_kl, **limits)
        self.gain = gain

    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Move the coefficient so that the KL approaches the target."""
        self.move(float(kl.double().mean()))

    def move(self, mean_kl: float) -> None:
        """Update the coefficient for an observed mean KL per token."""
        error = min(max((mean_kl - self.target_kl) / self.target_kl, -CLIP), CLIP)
        self._multiply(1 + self.gain * error)


class HorizonKLController(KLController):
    """Control the mean KL **per sequence**: coeff ← coeff (1 + clip(KL / target - 1, ±0.2) · n / horizon).

    n is the number of episodes of the rollout, limited to the horizon so that the coefficient stays positive.

    Args:
        coeff: initial coefficient.
        target_kl: in nats per sequence.
        horizon: number of episodes.
        limits: further arguments, see `KLController`.
    """

    target_kl: float

    def __init__(self, coeff: float, target_kl: float, *, horizon: float = 10_000, **limits: Any) -> None:
        super().__init__(coeff, target_kl, **limits)
        self.horizon = horizon

    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Move the coefficient so that the KL approaches the target."""
        self.move(float(kl.double().sum()) / len(lengths), len(lengths))

    def move(self, mean_kl: float, n_episodes: int) -> None:
        """Update the coefficient for an observed mean KL per sequence over `n_episodes` episodes."""
        error = min(max(mean_kl / self.target_kl - 1, -CLIP), CLIP)
        self._multiply(1 + error * min(n_episodes / self.horizon, 1.0))


def make_kl_controller(
    coeff: float,
    target_kl: float | None = None,
    *,
    controller: Literal["adaptive", "horizon", "fixed"] = "adaptive",
    gain: float = 0.1,
    horizon: float = 10_000,
    estimator: Estimator | None = None,
    max_coeff: float | None = None,
    placement: Placement = "reward",
    top_k: int | None = None,
) -> KLController:
    """Return the controller of a config's `alg.kl_div` block; without a target the coefficient is constant."""
    limits: dict[str, Any] = {"estimator": estimator, "max_coeff": max_coeff, "placement": placement, "top_k": top_k}
    if controller == "fixed" or target_kl is None:
        return FixedKLController(coeff, **limits)
    if controller == "horizon":
        return HorizonKLController(coeff, target_kl, horizon=horizon, **limits)
    return AdaptiveKLController(coeff, target_kl, gain=gain, **limits)
