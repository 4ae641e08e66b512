"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

from rl4lms_like.algorithms.arguments import PPOArguments
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.core.losses import clipped_surrogate, value_error
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

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the clipped surrogate, the critic's error and the negative entropy."""
        values, log_prob, entropy = self.policy.evaluate_actions(minibatch.observations, minibatch.actions)
        log_ratio = log_prob - minibatch.old_log_prob
        return Objective(
            policy=clipped_surrogate(log_ratio, minibatch.advantages, self.arguments.clip_range),
            value=value_error(values, minibatch.returns, minibatch.old_values, self.arguments.clip_range_vf),
            entropy=-entropy,
            log_ratio=log_ratio.detach(),
        )
