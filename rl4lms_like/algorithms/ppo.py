"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

from stable_baselines3.common.type_aliases import RolloutBufferSamples

from rl4lms_like.algorithms.arguments import PPOArguments
from rl4lms_like.algorithms.base import LossTerms, OnPolicyTextAlgorithm, episodes_of
from rl4lms_like.core.losses import clipped_surrogate, value_error


class PPO(OnPolicyTextAlgorithm):
    """PPO on whole episodes; its arguments are those of `PPOArguments`.

    On the same rollouts it takes Stable-Baselines3's steps, parameter for parameter.
    """

    arguments_class = PPOArguments
    arguments: PPOArguments

    def __init__(self, policy: Any, env: Any, **arguments: Any) -> None:
        super().__init__(policy, env, **arguments)
        self.n_epochs = self.arguments.n_epochs
        self.batch_size = self.arguments.batch_size
        self.target_kl = self.arguments.target_kl

    def loss(self, minibatch: RolloutBufferSamples) -> LossTerms:
        """The clipped surrogate, the critic's error and the entropy."""
        values, log_prob, entropy = self.policy.evaluate_actions(episodes_of(minibatch), minibatch.actions)
        log_ratio = log_prob - minibatch.old_log_prob
        return LossTerms(
            policy=clipped_surrogate(log_ratio, minibatch.advantages, self.arguments.clip_range),
            value=value_error(values, minibatch.returns, minibatch.old_values, self.arguments.clip_range_vf),
            entropy=-entropy.mean(),
            log_ratio=log_ratio.detach(),
        )
