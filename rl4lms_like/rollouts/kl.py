"""Coefficient of the KL penalty in the reward or the loss, and its controllers.

task reward r_t  ─────────────┐
log_prob, ref_log_prob ─ kl_t ┴─ r_t - coeff * kl_t ─ advantages
                           └─ mean over the rollout ─ controller ─ new coeff: for this rollout's update (placements
                              advantage and loss), and for the rewards of the next rollout

This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl4lms_like.core.kl_estimators import Estimator, Placement, estimator_error
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.numbers import Count, NonNegative, Positive
from rl4lms_like.system.schema import Block

if TYPE_CHECKING:
    from torch import Tensor

CLIP = 0.2
"""Relative errors are clipped to this size (arXiv 1909.08593, section 2.2)."""
TOP_K = 64
"""Default number of tokens of the estimator `top_k`."""


@dataclass(frozen=True, kw_only=True)
class KLConfig(Block):
    """The `alg.kl_div` block: the KL penalty against the reference model.

    Args:
        coeff: initial KL coefficient. 0 disables the penalty, and no reference model is loaded.
        target_kl: KL that the controller aims at, in nats per token (with `horizon`, per sequence). null leaves the
            coefficient constant.
        norm_reward: divide the task rewards of a rollout by the standard deviation of its episodes' totals.
        controller: how the coefficient follows the KL: `adaptive` (that of RL4LMs), `horizon` (arXiv 1909.08593) or
            `fixed`; default: `adaptive` if `target_kl` is given, else `fixed`.
        gain: for `adaptive`: step size of the coefficient per iteration; 0.1 changes it by at most 2 %.
        horizon: for `horizon`: number of episodes over which the coefficient may change by 20 %.
        estimator: how a token's KL is estimated. `k1`, `k2`, `k3`: from its log-ratio. In the loss also `top_k`: the
            exact KL over the most probable tokens of the policy and the sum of all others; `full`: over the whole
            vocabulary. Default: `k3` in the loss (`k2` for `reinforce_pp_baseline`), else `k1`. `k1` in the loss is an
            error, because its expected gradient is 0.
        top_k: number of tokens of the estimator `top_k`; default: 64.
        max_coeff: upper limit of the coefficient; null sets none.
        placement: subtract the penalty from the `reward` of each token. For algorithms without a critic also
            `advantage`: subtract it from the advantage of the same token only; `loss`: add it to the loss. Default:
            `loss` for these, except for `rloo`, `reinforce_pp` (`reward`) and `opd` (`advantage`, or `loss` if the
            estimator needs it).
    """

    coeff: NonNegative
    target_kl: Positive | None = None
    norm_reward: bool = False
    controller: Literal["adaptive", "horizon", "fixed"] | None = None
    gain: Positive = 0.1
    horizon: Count = 10_000
    estimator: Estimator | None = None
    top_k: Count | None = None
    max_coeff: Positive | None = None
    placement: Placement | None = None

    def __post_init__(self) -> None:
        if self.controller is None:
            object.__setattr__(self, "controller", "fixed" if self.target_kl is None else "adaptive")

    def issues(self) -> Iterator[ConfigIssue]:
        if error := estimator_error(self.placement or "reward", self.estimator, self.top_k):
            yield ConfigIssue("", error)
        if self.controller != "fixed" and self.target_kl is None:
            message = f"controller {self.controller!r} needs target_kl; or set controller to 'fixed'"
            yield ConfigIssue("", message)
        if self.coeff == 0 and self.target_kl is not None:
            message = "a coefficient of 0 stays 0 and target_kl has no effect: start above 0, e.g. 0.001"
            yield ConfigIssue("", message)


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

        # The limit holds for the initial coefficient too.
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

    def config(self, norm_reward: bool) -> KLConfig:
        """Return the settings that a config would have, for rules."""
        return KLConfig(coeff=self.coeff, estimator=self.estimator, placement=self.placement, norm_reward=norm_reward)

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

    # Without a target there is nothing to follow.
    if controller == "fixed" or target_kl is None:
        return FixedKLController(coeff, **limits)
    if controller == "horizon":
        return HorizonKLController(coeff, target_kl, horizon=horizon, **limits)
    return AdaptiveKLController(coeff, target_kl, gain=gain, **limits)
