"""Advantage actor-critic (Mnih et al., arXiv 1602.01783), in its synchronous form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl4lms_like.algorithms.arguments import A2CArguments
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.core.losses import policy_gradient, value_error
from rl4lms_like.core.objective import Objective
from rl4lms_like.rollouts.buffer import Minibatch


class A2C(OnPolicyTextAlgorithm):
    """A2C: one step on the whole rollout; its arguments are those of `A2CArguments`."""

    arguments_class = A2CArguments
    arguments: A2CArguments

    def policy_defaults(self, policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if not self.arguments.use_rms_prop:
            return {}

        # The paper's optimizer (section 4), with Stable-Baselines3's alpha, the decay of the mean of squared gradients.
        return {
            "optimizer_class": torch.optim.RMSprop,
            "optimizer_kwargs": {"alpha": 0.99, "eps": self.arguments.rms_prop_eps},
        }

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the policy gradient loss, the critic's error and the negative entropy."""
        values, log_prob, entropy = self.policy.evaluate_actions(minibatch.observations, minibatch.actions)

        # L_t = -A_t log pi(a_t), without a ratio: the only step on a rollout is taken at the rollout's policy.
        return Objective(
            policy=policy_gradient(log_prob, minibatch.advantages),
            value=value_error(values, minibatch.returns),
            entropy=-entropy,
            log_ratio=(log_prob - minibatch.old_log_prob).detach(),
        )
