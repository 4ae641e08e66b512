"""Proximal policy optimisation (Schulman et al., arXiv 1707.06347).

ratio     pi(a_t | s_t) / pi_old(a_t | s_t)         pi_old: the policy of the rollout
policy    -min(ratio A, clip(ratio, 1 - c, 1 + c') A)     c: clip_range, c': clip_range_high
          at most -dual_clip A where A < 0; or -ratio A of the actions whose ratio is in `ratio_band`
value     (V - R)^2, optionally clipped around the values of the rollout
entropy   -H, times ent_coef
nll       -log pi of the actions of good episodes (VAPO), if `nll_coef` is not 0

The KL penalty is in the rewards (`rollouts.rollout.token_rewards`).
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rl4lms_like.algorithms.arguments import PPOArguments
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.core.losses import clipped_surrogate, surrogate, value_error
from rl4lms_like.core.objective import Objective
from rl4lms_like.rollouts.buffer import Minibatch

SMALLEST_MEAN = 1e-30
"""Avoids a division by 0 if no action is in the band, or no episode is good."""


class PPO(OnPolicyTextAlgorithm):
    """PPO on whole episodes; its arguments are those of `PPOArguments`.

    On the same rollouts, with one learning rate and one norm of the gradient for policy and critic, its steps are equal
    to those of Stable-Baselines3's PPO.
    """

    arguments_class = PPOArguments
    arguments: PPOArguments

    def __init__(self, policy: Any, env: Any, **arguments: Any) -> None:
        super().__init__(policy, env, **arguments)
        self.n_epochs = self.arguments.n_epochs
        self.batch_size = self.arguments.batch_size
        self.target_kl = self.arguments.target_kl
        self.loss_aggregation = self.arguments.loss_aggregation or self.loss_aggregation

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the terms of the module's docstring, one number per action."""
        options = self.arguments

        # The critic may make fewer passes over a rollout than the policy; its forward pass is then skipped.
        value = None
        if self._trains_critic:
            values, log_prob, entropy = self.policy.evaluate_actions(minibatch.observations, minibatch.actions)
            value = value_error(values, minibatch.returns, minibatch.old_values, options.clip_range_vf)
        else:
            scores = self.policy.action_scores(minibatch.observations)
            log_prob = scores.log_prob
            entropy = scores.entropy
        log_ratio = log_prob - minibatch.old_log_prob  # [n_actions]

        if options.ratio_band is None:
            policy_loss = clipped_surrogate(
                log_ratio,
                minibatch.advantages,
                clip_range=options.clip_range,
                clip_high=options.clip_range_high,
                dual_clip=options.dual_clip,
            )
        else:
            # Actions outside the band have no loss and do not count: the mean is over those within it.
            in_band = self._in_band(log_ratio)
            fraction = in_band.mean() if minibatch.fraction_in_band is None else minibatch.fraction_in_band
            policy_loss = surrogate(log_ratio, minibatch.advantages) * in_band / fraction.clamp_min(SMALLEST_MEAN)

        return Objective(
            policy=policy_loss,
            value=value,
            entropy=-entropy,
            log_ratio=log_ratio.detach(),
            nll=None if minibatch.nll_weights is None else -minibatch.nll_weights * log_prob,
        )

    def _in_band(self, log_ratio: Tensor) -> Tensor:
        """Return 1 for actions whose ratio is in `ratio_band`, else 0 `[n_actions]`."""
        low, high = self.ratio_limits
        ratio = log_ratio.detach().exp()
        return ((ratio >= low) & (ratio <= high)).float()

    def prepare_minibatch(self, minibatch: Minibatch) -> Minibatch:
        minibatch = super().prepare_minibatch(minibatch)
        options = self.arguments

        # Imitation of good episodes: the mean is over their actions, not over all (VAPO, arXiv 2504.05118).
        if options.nll_coef:
            is_good = (minibatch.episode_rewards >= options.nll_threshold).float()  # [n_actions]
            nll_weights = is_good / is_good.mean().clamp_min(SMALLEST_MEAN)
            minibatch = minibatch._replace(nll_weights=nll_weights)

        # The number of actions in the band, over all micro-batches and processes, must be known before the first
        # backward pass. It costs a forward pass, which a minibatch in one part does not need.
        if options.ratio_band is not None and (options.micro_batch_size is not None or self.ranks.size > 1):
            in_band = []
            with torch.no_grad():
                for micro_batch, fraction in self._split(minibatch, options.micro_batch_size):
                    log_prob = self.policy.action_scores(micro_batch.observations).log_prob
                    if fraction:  # 0: a pass that only keeps step with the other processes
                        in_band.append(self._in_band(log_prob - micro_batch.old_log_prob))
            of_all_processes = chain.from_iterable(self.ranks.gather(in_band))
            minibatch = minibatch._replace(fraction_in_band=torch.cat(list(of_all_processes)).mean())
        return minibatch

    def total_loss(self, objective: Objective, weights: Tensor) -> Tensor:
        total = super().total_loss(objective, weights)
        if objective.nll is not None:
            total = total + self.arguments.nll_coef * objective.nll.mean()  # its weights are in the term
        return total

    @property
    def _trains_critic(self) -> bool:
        """True in the passes over the rollout that also train the critic, and outside of an update."""
        return self.update_progress is None or self.update_progress.epoch <= self._critic_epochs

    @property
    def ratio_limits(self) -> tuple[float, float]:
        options = self.arguments
        if options.ratio_band is not None:
            return options.ratio_band
        high = options.clip_range if options.clip_range_high is None else options.clip_range_high
        return 1 - options.clip_range, 1 + high
