"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl4lms_like.algorithms.arguments import PPOArguments
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.core.losses import clipped_surrogate, surrogate, value_error
from rl4lms_like.core.objective import Objective
from rl4lms_like.rollouts.buffer import Minibatch


class PPO(OnPolicyTextAlgorithm):
    """PPO on whole episodes; its arguments are those of `PPOArguments`.

    On the same rollouts its steps are equal to those of Stable-Baselines3's PPO.
    """

    arguments_class = PPOArguments
    arguments: PPOArguments

    def __init__(self, policy: Any, env: Any, **arguments: Any) -> None:
        super().__init__(policy, env, **arguments)
        self.n_epochs = self.arguments.n_epochs
        self.batch_size = self.arguments.batch_size
        self.target_kl = self.arguments.target_kl
        self.loss_aggregation = self.arguments.loss_aggregation or self.loss_aggregation
        self._kept_fraction: Tensor | None = None

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the clipped surrogate, the critic's error and the negative entropy."""
        options = self.arguments
        if self._trains_critic:
            values, log_prob, entropy = self.policy.evaluate_actions(minibatch.observations, minibatch.actions)
            value = value_error(values, minibatch.returns, minibatch.old_values, options.clip_range_vf)
        else:
            scores = self.policy.action_scores(minibatch.observations)
            log_prob, entropy, value = scores.log_prob, scores.entropy, None
        log_ratio = log_prob - minibatch.old_log_prob
        return Objective(
            policy=self._policy_loss(log_ratio, minibatch.advantages),
            value=value,
            entropy=-entropy,
            log_ratio=log_ratio.detach(),
            nll=-minibatch.nll_weights * log_prob if options.nll_coef else None,
        )

    def _policy_loss(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        options = self.arguments
        if options.ratio_band is None:
            return clipped_surrogate(
                log_ratio, advantages, options.clip_range, options.clip_range_high, options.dual_clip
            )
        kept = self._in_band(log_ratio)
        fraction = kept.mean() if self._kept_fraction is None else self._kept_fraction
        return surrogate(log_ratio, advantages) * kept / fraction.clamp_min(1e-30)

    def _in_band(self, log_ratio: Tensor) -> Tensor:
        """Return 1 for actions whose ratio is in `ratio_band`, else 0 `[n_actions]`."""
        low, high = self._ratio_limits
        ratio = log_ratio.detach().exp()
        return ((ratio >= low) & (ratio <= high)).float()

    def _prepared(self, minibatch: Minibatch) -> Minibatch:
        minibatch = super()._prepared(minibatch)
        options = self.arguments
        if options.nll_coef:
            good = (minibatch.episode_rewards >= options.nll_threshold).float()
            minibatch = minibatch._replace(nll_weights=good / good.mean().clamp_min(1e-30))
        if options.ratio_band is not None and (options.micro_batch_size is not None or self.ranks.size > 1):
            # The mean over the kept actions of all micro-batches must be known before the first backward pass.
            with torch.no_grad():
                parts = [
                    (self._in_band(self.policy.action_scores(part.observations).log_prob - part.old_log_prob), fraction)
                    for part, fraction in self._split(minibatch, options.micro_batch_size)
                ]
            kept = self.ranks.gather([part for part, fraction in parts if fraction])
            self._kept_fraction = torch.cat([part for own in kept for part in own]).mean()
        return minibatch

    def _total(self, objective: Objective, weights: Tensor) -> Tensor:
        total = super()._total(objective, weights)
        return total if objective.nll is None else total + self.arguments.nll_coef * objective.nll.mean()

    @property
    def _trains_critic(self) -> bool:
        """True in the passes over the rollout that also train the critic."""
        return self.update is None or self.update.epoch <= self._critic_epochs

    @property
    def _ratio_limits(self) -> tuple[float, float]:
        options = self.arguments
        if options.ratio_band is not None:
            return options.ratio_band
        high = options.clip_range if options.clip_range_high is None else options.clip_range_high
        return 1 - options.clip_range, 1 + high
