"""Critic-free policy gradients: responses are compared with those to the same prompt, not with a learned value.

    rollout ─ episode rewards ─ advantages (`core.advantages`) ─ surrogate (`core.losses`) ─ mean (`core.objective`)

One class has all building blocks. Every algorithm of this module is that class with other defaults
(`critic_free_arguments`), except `OnlineDPO`, which has its own loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl4lms_like.algorithms import critic_free_arguments as arguments_of
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.core import losses, preference_losses
from rl4lms_like.core.advantages import group_advantages, overlong_penalty, returns_to_go, rewards_differ, whitened
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.kl_estimators import WITH_DISTRIBUTIONS
from rl4lms_like.core.objective import Objective
from rl4lms_like.policies.teacher_forcing import ActionScores
from rl4lms_like.rollouts.buffer import Minibatch
from rl4lms_like.rollouts.progress import Logged


class GroupPolicyGradient(OnPolicyTextAlgorithm):
    """Policy gradient without a critic; its arguments are those of `CriticFreeArguments`."""

    arguments_class = arguments_of.CriticFreeArguments
    arguments: arguments_of.CriticFreeArguments

    def __init__(self, policy: Any, env: Any, **arguments: Any) -> None:
        super().__init__(policy, env, **arguments)
        self.n_epochs = self.arguments.n_epochs
        self.batch_size = self.arguments.batch_size
        self.target_kl = self.arguments.target_kl
        self.loss_aggregation = self.arguments.loss_aggregation

    def _setup_model(self) -> None:
        super()._setup_model()
        if self.arguments.reference_update_iterations is not None:
            self.policy.allow_reference_updates()

    def train(self) -> None:
        """Run an update, then update the reference model if an interval is complete."""
        super().train()
        interval = self.arguments.reference_update_iterations
        if interval is not None:
            if self.n_iterations % interval == 0:
                self.weights_change()
                self.policy.update_reference(self.arguments.reference_mixing)
            self.logger.record("train/reference_updates", self.n_iterations // interval)

    def training_state(self) -> dict[str, Any]:
        """Return the state of every algorithm, and the number of completed updates."""
        return {**super().training_state(), "n_iterations": self.n_iterations}

    # --- advantages -------------------------------------------------------------------------------------------------

    def prepare_rollout(self) -> None:
        """Replace the buffer's estimates, which are those of a critic, by the advantages of this algorithm."""
        buffer, controller = self.rollout_buffer, self.kl_controller
        log_prob = torch.as_tensor(buffer.log_probs)
        buffer.advantages = self._task_advantages() if self.arguments.task_reward else torch.zeros_like(log_prob)
        if controller.placement == "advantage" and buffer.kl is not None:
            buffer.advantages = buffer.advantages - controller.coeff * buffer.kl

    def _padded_rewards(self, episodes: EpisodeBatch) -> Tensor:
        """Return the rewards with the penalty for long responses `[n, response_len]`."""
        lengths, fraction = episodes.lengths, self.arguments.overlong_buffer
        rewards = episodes.pad(torch.as_tensor(self.rollout_buffer.rewards, device=lengths.device))
        if fraction is not None:
            longest = self.collector.max_episode_length
            last = episodes.action_mask.long().cumsum(dim=1).argmax(dim=1)
            penalty = overlong_penalty(lengths, longest, fraction * longest)
            rewards[torch.arange(len(last), device=last.device), last] += penalty.to(rewards)
        return rewards

    def _task_advantages(self) -> Tensor:
        """Return the advantages of the rewards `[n_actions]`."""
        options, episodes = self.arguments, self.rollout_buffer.episodes
        assert episodes is not None
        mask, lengths, rewards = episodes.action_mask, episodes.lengths, self._padded_rewards(episodes)
        if options.baseline == "none":
            advantages = returns_to_go(rewards, mask, options.gamma)
        else:
            totals, groups = rewards.sum(dim=1), episodes.group_ids
            assert groups is not None
            if options.scale == "mean":
                _check_binary(totals)
            of_episodes = group_advantages(
                totals, groups, baseline=options.baseline, scale=options.scale, lengths=lengths, eps=arguments_of.EPS
            )
            advantages = of_episodes[:, None] * mask
        if options.scale == "whiten":
            advantages = whitened(advantages, mask)
        return advantages[mask]

    # --- loss -------------------------------------------------------------------------------------------------------

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the surrogate with the drift, the KL penalty and the negative entropy."""
        options, lengths = self.arguments, minibatch.observations.lengths
        scores = self.policy.action_scores(minibatch.observations)
        log_ratio = scores.log_prob - minibatch.old_log_prob
        ratio = losses.sequence_log_ratio(log_ratio, lengths) if options.ratio_level == "sequence" else log_ratio
        policy = self._surrogate(scores.log_prob, ratio, minibatch.advantages, lengths)
        if options.drift_coef:
            policy = policy + options.drift_coef * losses.policy_drift(log_ratio)
        return Objective(
            policy=policy,
            entropy=-scores.entropy,
            log_ratio=log_ratio.detach(),
            kl=self._kl_penalty(scores, minibatch),
            clipped=self._clipped(ratio.detach()),
        )

    def _surrogate(self, log_prob: Tensor, log_ratio: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
        options = self.arguments
        low, high = options.clip_range, options.clip_high
        if options.surrogate == "geometric":
            return losses.geometric_mean_surrogate(log_ratio, advantages, lengths, low, high)
        if options.surrogate == "cispo":
            return losses.cispo(log_prob, log_ratio, advantages, 1 + high)
        if options.surrogate == "cpgd":
            return losses.cpgd(log_ratio, advantages, low, high)
        return losses.clipped_surrogate(log_ratio, advantages, low, high, options.dual_clip)

    def _clipped(self, log_ratio: Tensor) -> Tensor:
        """Return 1 for actions whose ratio is outside the range of the surrogate, else 0 `[n_actions]`."""
        options = self.arguments
        if options.surrogate == "geometric":
            return ((log_ratio < -options.clip_range) | (log_ratio > options.clip_high)).float()
        ratio = log_ratio.exp()
        is_below = ratio < 1 - options.clip_range if options.surrogate != "cispo" else torch.zeros_like(ratio).bool()
        return (is_below | (ratio > 1 + options.clip_high)).float()

    def _kl_penalty(self, scores: ActionScores, minibatch: Minibatch) -> Tensor | None:
        controller = self.kl_controller
        if controller.placement != "loss" or not self.policy.has_reference:
            return None
        if controller.estimator in WITH_DISTRIBUTIONS:
            kl = self.policy.reference_kl(minibatch.observations, scores, top_k=controller.top_k)
        else:
            kl = losses.kl_estimate(scores.log_prob, minibatch.ref_log_prob, controller.estimator)
        return controller.coeff * kl


def _check_binary(rewards: Tensor) -> None:
    """Raise a `RewardError` if a reward is neither 0 nor 1."""
    other = rewards[(rewards != 0) & (rewards != 1)]
    if len(other):
        raise RewardError(
            f"scale: mean (maxrl) requires rewards of 0 or 1, got {float(other[0]):g}: use another reward, or another "
            f"scale (grpo)"
        )


class GRPO(GroupPolicyGradient):
    """Group relative policy optimisation (Shao et al., arXiv 2402.03300)."""

    arguments_class = arguments_of.GRPOArguments


class DrGRPO(GroupPolicyGradient):
    """GRPO without its two biases (Liu et al., arXiv 2503.20783)."""

    arguments_class = arguments_of.DrGRPOArguments


class DAPO(GroupPolicyGradient):
    """Decoupled clip and dynamic sampling policy optimisation (Yu et al., arXiv 2503.14476)."""

    arguments_class = arguments_of.DAPOArguments


class GSPO(GroupPolicyGradient):
    """Group sequence policy optimisation (Zheng et al., arXiv 2507.18071)."""

    arguments_class = arguments_of.GSPOArguments


class GMPO(GroupPolicyGradient):
    """Geometric-mean policy optimisation (Zhao et al., arXiv 2507.20673)."""

    arguments_class = arguments_of.GMPOArguments


class CPGD(GroupPolicyGradient):
    """Clipped policy gradient optimisation with policy drift (Liu et al., arXiv 2505.12504)."""

    arguments_class = arguments_of.CPGDArguments


class CISPO(GroupPolicyGradient):
    """Clipped importance sampling weights in policy optimisation (MiniMax, arXiv 2506.13585)."""

    arguments_class = arguments_of.CISPOArguments


class RLOO(GroupPolicyGradient):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al., arXiv 2402.14740)."""

    arguments_class = arguments_of.RLOOArguments


class ReinforcePP(GroupPolicyGradient):
    """REINFORCE++ (Hu et al., arXiv 2501.03262)."""

    arguments_class = arguments_of.ReinforcePPArguments


class ReinforcePPBaseline(GroupPolicyGradient):
    """REINFORCE++ with the mean of a group as its baseline (Hu et al., arXiv 2501.03262)."""

    arguments_class = arguments_of.ReinforcePPBaselineArguments


class OPO(GroupPolicyGradient):
    """On-policy optimisation with the baseline of least variance (Hao et al., arXiv 2505.23585)."""

    arguments_class = arguments_of.OPOArguments


class MaxRL(GroupPolicyGradient):
    """Maximum likelihood reinforcement learning (arXiv 2602.02710)."""

    arguments_class = arguments_of.MaxRLArguments


class OPD(GroupPolicyGradient):
    """On-policy distillation: the KL to a teacher, on the policy's own samples (Agarwal et al., arXiv 2306.13649)."""

    arguments_class = arguments_of.OPDArguments


_WITHOUT_PAIR = ("policy", "entropy", "loss", "approx_kl", "clip_fraction", "minibatch_episodes", "grad_norm")
"""Logged numbers of a step."""


class OnlineDPO(GroupPolicyGradient):
    """Direct preference optimisation of the policy's own responses (Guo et al., arXiv 2402.04792)."""

    arguments_class = arguments_of.OnlineDPOArguments
    arguments: arguments_of.OnlineDPOArguments
    learns_off_policy = False  # its loss has no weights that correct for the rollout of another policy
    n_together = 2

    def _setup_model(self) -> None:
        super()._setup_model()
        self.rollout_buffer.keeps_groups = True

    def prepare_rollout(self) -> None:
        """Find the pairs: the advantage is 1 for the best response to a prompt, -1 for the worst one, else 0."""
        buffer, episodes = self.rollout_buffer, self.rollout_buffer.episodes
        assert episodes is not None and episodes.group_ids is not None
        rewards, signs = self._padded_rewards(episodes).sum(dim=1), torch.zeros_like(episodes.lengths)
        differ = rewards_differ(rewards, episodes.group_ids)
        for group in episodes.group_ids.unique():
            rows = (episodes.group_ids == group).nonzero()[:, 0]
            best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
            if differ[best]:
                signs[best], signs[worst] = 1, -1
        buffer.advantages = signs.to(torch.as_tensor(buffer.log_probs)).repeat_interleave(episodes.lengths)
        self.logger.record("train/pairs", int((signs > 0).sum()))

    def skip_minibatch(self, minibatch: Minibatch) -> Logged | None:
        """Skip a minibatch that has no pair; its logged numbers are NaN."""
        if bool(minibatch.advantages.any()):
            return None
        return dict.fromkeys(_WITHOUT_PAIR, torch.tensor(math.nan))

    def prepare_minibatch(self, minibatch: Minibatch) -> Minibatch:
        """Return only the pairs of a minibatch, the best response of each before its worst one.

        Both have the loss of the pair for each action. With the weights of the actions, its mean is that over pairs.
        """
        episodes = minibatch.observations
        assert episodes.group_ids is not None
        signs = minibatch.advantages[episodes.lengths.cumsum(0) - 1]
        best, worst = ((signs == sign).nonzero()[:, 0] for sign in (1, -1))
        best, worst = (rows[episodes.group_ids[rows].argsort()] for rows in (best, worst))
        minibatch = minibatch.select(torch.stack([best, worst], dim=1).flatten())
        lengths = minibatch.observations.lengths.view(-1, 2).sum(dim=1)
        weights = int(lengths.sum()) / (len(lengths) * lengths.float())
        return minibatch._replace(weights=weights.repeat_interleave(lengths))

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the loss of its pair for each action, and the negative entropy."""
        options, beta, lengths = self.arguments, self.kl_controller.coeff, minibatch.observations.lengths
        scores = self.policy.action_scores(minibatch.observations)
        log_ratio = (scores.log_prob - minibatch.old_log_prob).detach()
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        to_reference = scores.log_prob - minibatch.ref_log_prob
        best, worst = to_reference.new_zeros(len(lengths)).index_add(0, rows, to_reference).view(-1, 2).unbind(dim=1)
        if options.loss == "ipo":
            of_pairs = preference_losses.ipo_loss(best, worst, beta)
        elif options.loss == "hinge":
            of_pairs = preference_losses.hinge_loss(best, worst, beta)
        else:
            of_pairs = preference_losses.dpo_loss(best, worst, beta, options.label_smoothing)
        return Objective(
            policy=of_pairs[rows // 2],
            entropy=-scores.entropy,
            log_ratio=log_ratio,
            clipped=torch.zeros_like(log_ratio),
        )
