"""The KL penalty of the reward: its coefficient and who controls it.

task reward r_t  ─────────────┐
log_prob, ref_log_prob ─ kl_t ┴─ r_t - coeff * kl_t ─ advantages
                           └─ mean over the rollout ─ controller ─ coeff of the next rollout
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from torch import Tensor

from rl4lms_like.core.losses import KLEstimator

CLIP = 0.2
"""Largest relative error that a controller reacts to (arXiv 1909.08593, section 2.2)."""


class KLController(ABC):
    """Holds the coefficient and moves it after each rollout.

    Args:
        coeff: the first coefficient.
        estimator: which single-sample estimate of the KL is paid for in the reward.
        max_coeff: the coefficient never exceeds this; None = no limit.
    """

    def __init__(self, coeff: float, *, estimator: KLEstimator = "k1", max_coeff: float | None = None) -> None:
        self.coeff = float(coeff if max_coeff is None else min(coeff, max_coeff))
        self.estimator = estimator
        self.max_coeff = max_coeff

    @abstractmethod
    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Sees a rollout's KL.

        Args:
            kl: k1 of every token `[n_tokens]`.
            lengths: tokens of every episode `[n]`.
        """

    @property
    def target_kl(self) -> float | None:
        """What the controller steers to, in its own unit; None if it does not steer."""
        return None

    def _multiply(self, factor: float) -> None:
        self.coeff *= factor
        if self.max_coeff is not None:
            self.coeff = min(self.coeff, self.max_coeff)

    def state_dict(self) -> dict[str, Any]:
        """What changes during a run."""
        return {"coeff": self.coeff}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.coeff = state["coeff"]


class FixedKLController(KLController):
    """A coefficient that stays as it is."""

    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Does nothing."""


class AdaptiveKLController(KLController):
    """coeff ← coeff (1 + gain · clip((KL - target) / target, ±0.2)), KL the mean **per token** (RL4LMs' form).

    Args:
        coeff: the first coefficient.
        target_kl: nats per token.
        gain: K_beta of arXiv 1909.08593; 0.1 moves the coefficient by at most 2 % an iteration.
        estimator: see `KLController`.
        max_coeff: see `KLController`.
    """

    def __init__(
        self,
        coeff: float,
        target_kl: float,
        *,
        gain: float = 0.1,
        estimator: KLEstimator = "k1",
        max_coeff: float | None = None,
    ) -> None:
        super().__init__(coeff, estimator=estimator, max_coeff=max_coeff)
        self._target = target_kl
        self.gain = gain

    @property
    def target_kl(self) -> float:
        """Nats per token."""
        return self._target

    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Moves the coefficient towards the target."""
        self.move(float(kl.double().mean()))

    def move(self, mean_kl: float) -> None:
        """Moves the coefficient for an observed mean KL per token."""
        error = np.clip((mean_kl - self._target) / self._target, -CLIP, CLIP)
        self._multiply(float(1 + self.gain * error))


class HorizonKLController(KLController):
    """coeff ← coeff (1 + clip(KL / target - 1, ±0.2) · n / horizon), KL the mean **per sequence**, n its episodes.

    n counts at most up to the horizon, so that the coefficient stays positive.

    Args:
        coeff: the first coefficient.
        target_kl: nats per sequence.
        horizon: episodes.
        estimator: see `KLController`.
        max_coeff: see `KLController`.
    """

    def __init__(
        self,
        coeff: float,
        target_kl: float,
        *,
        horizon: float = 10_000,
        estimator: KLEstimator = "k1",
        max_coeff: float | None = None,
    ) -> None:
        super().__init__(coeff, estimator=estimator, max_coeff=max_coeff)
        self._target = target_kl
        self.horizon = horizon

    @property
    def target_kl(self) -> float:
        """Nats per sequence."""
        return self._target

    def step(self, kl: Tensor, lengths: Tensor) -> None:
        """Moves the coefficient towards the target."""
        self.move(float(kl.double().sum()) / len(lengths), len(lengths))

    def move(self, mean_kl: float, n_episodes: int) -> None:
        """Moves the coefficient for an observed mean KL per sequence over `n_episodes` episodes."""
        error = np.clip(mean_kl / self._target - 1, -CLIP, CLIP)
        self._multiply(float(1 + error * min(n_episodes / self.horizon, 1.0)))


def make_kl_controller(
    coeff: float,
    target_kl: float | None = None,
    *,
    controller: Literal["adaptive", "horizon", "fixed"] = "adaptive",
    gain: float = 0.1,
    horizon: float = 10_000,
    estimator: KLEstimator = "k1",
    max_coeff: float | None = None,
) -> KLController:
    """The controller of a config's `alg.kl_div` block; without a target the coefficient is fixed."""
    if controller == "fixed" or target_kl is None:
        return FixedKLController(coeff, estimator=estimator, max_coeff=max_coeff)
    if controller == "horizon":
        return HorizonKLController(coeff, target_kl, horizon=horizon, estimator=estimator, max_coeff=max_coeff)
    return AdaptiveKLController(coeff, target_kl, gain=gain, estimator=estimator, max_coeff=max_coeff)
