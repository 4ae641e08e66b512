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
from rl4lms_like.core.kl_estimators import WITH_DISTRIBUTIONS
from rl4lms_like.core.objective import Objective
from rl4lms_like.policies.teacher_forcing import ActionScores
from rl4lms_like.rollouts.buffer import Minibatch
from rl4lms_like.rollouts.progress import Logged
from rl4lms_like.system.errors import RewardError


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

    # --- from the reward to the advantage ---------------------------------------------------------------------------
    #
    # The rollout has the reward of each token already (`rollouts.rollout.token_rewards`): that of the task, scaled if
    # `norm_reward` says so, minus the KL penalty with `placement: reward`. What comes later, in this order:
    #
    #     r_T += overlong penalty         last action only; DAPO                           `_padded_rewards`
    #     A_t  = (R - baseline) / scale   R = sum_t r_t; without baseline the returns      `_task_advantages`
    #     A_t -= coeff * KL_t             `placement: advantage`                           `prepare_rollout`
    #     L_t += coeff * KL_t             `placement: loss`, with a gradient of its own    `_kl_penalty`

    def prepare_rollout(self) -> None:
        """Replace the buffer's estimates, which are those of a critic, by the advantages of this algorithm."""
        buffer = self.rollout_buffer
        if self.arguments.task_reward:
            advantages = self._task_advantages()  # [n_actions]
        else:
            advantages = torch.zeros_like(torch.as_tensor(buffer.log_probs))

        # A_t <- A_t - coeff (log pi_old(a_t) - log ref(a_t)). Subtracted last, so that neither the baseline nor the
        # scale changes it, and from the token's own advantage only: it is not part of the returns of earlier tokens.
        controller = self.kl_controller
        if controller.placement == "advantage" and buffer.kl is not None:
            advantages = advantages - controller.coeff * buffer.kl
        buffer.advantages = advantages

    def _padded_rewards(self, episodes: EpisodeBatch) -> Tensor:
        """Return the rewards with the penalty for long responses `[n, response_len]`."""
        lengths = episodes.response_lengths  # of the texts that reach the limit: actions and answers of environments
        rewards = episodes.pad(torch.as_tensor(self.rollout_buffer.rewards, device=lengths.device))
        fraction = self.arguments.overlong_buffer
        if fraction is None:
            return rewards

        # The penalty is not part of the rollout's rewards: dynamic sampling compares groups without it, and
        # `norm_reward` does not scale it.
        longest = self.collector.max_episode_length
        penalty = overlong_penalty(lengths, longest, fraction * longest)  # [n], from 0 to -1

        # The last action is where the count of actions first reaches its largest value. Padding or tokens of the
        # environment may follow it.
        last = episodes.action_mask.long().cumsum(dim=1).argmax(dim=1)  # [n]
        rewards[torch.arange(len(last), device=last.device), last] += penalty.to(rewards)
        return rewards

    def _task_advantages(self) -> Tensor:
        """Return the advantages of the rewards `[n_actions]`."""
        options = self.arguments
        episodes = self.rollout_buffer.episodes
        assert episodes is not None
        mask = episodes.action_mask  # [n, response_len]
        rewards = self._padded_rewards(episodes)  # [n, response_len], 0 outside the mask

        if options.baseline == "none":
            # REINFORCE: A_t = sum_{k >= 0} gamma^k r_{t + k}
            advantages = returns_to_go(rewards, mask, options.gamma)
        else:
            # A_t = (R - baseline) / scale, the same for all actions of a response. R is not discounted.
            totals = rewards.sum(dim=1)  # R, [n]
            if options.scale == "mean":
                _check_binary(totals)
            assert episodes.group_ids is not None
            episode_advantages = group_advantages(
                totals,
                episodes.group_ids,
                baseline=options.baseline,
                scale=options.scale,
                lengths=episodes.lengths,
                eps=arguments_of.EPS,
            )
            advantages = episode_advantages[:, None] * mask

        # REINFORCE++: mean 0 and variance 1 over all actions of the rollout, so that a minibatch changes no statistics.
        if options.scale == "whiten":
            advantages = whitened(advantages, mask)
        return advantages[mask]

    # --- loss -------------------------------------------------------------------------------------------------------

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the surrogate with the drift, the KL penalty and the negative entropy."""
        options = self.arguments
        lengths = minibatch.observations.lengths  # [n_episodes]
        scores = self.policy.action_scores(minibatch.observations)
        log_ratio = scores.log_prob - minibatch.old_log_prob  # log r_t = log pi - log pi_old, [n_actions]

        # GSPO has one ratio for a response, s = (pi(y) / pi_old(y))^(1 / |y|), in place of those of its tokens.
        surrogate_log_ratio = log_ratio
        if options.ratio_level == "sequence":
            surrogate_log_ratio = losses.sequence_log_ratio(log_ratio, lengths)

        # L_t = surrogate(r_t, A_t) + drift_coef (r_t - 1 - log r_t). The drift is always that of the tokens.
        policy = self._surrogate(scores.log_prob, surrogate_log_ratio, minibatch.advantages, lengths)
        if options.drift_coef:
            policy = policy + options.drift_coef * losses.policy_drift(log_ratio)

        return Objective(
            policy=policy,
            entropy=-scores.entropy,
            log_ratio=log_ratio.detach(),
            kl=self._kl_penalty(scores, minibatch),
            clipped=self._clipped(surrogate_log_ratio.detach()),
        )

    def _surrogate(self, log_prob: Tensor, log_ratio: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
        """Return the loss of each action under the configured surrogate `[n_actions]`."""
        options = self.arguments
        low = options.clip_range
        high = options.clip_high

        if options.surrogate == "geometric":
            return losses.geometric_mean_surrogate(log_ratio, advantages, lengths, low=low, high=high)
        if options.surrogate == "cispo":
            return losses.cispo(log_prob, log_ratio, advantages, 1 + high)
        if options.surrogate == "cpgd":
            return losses.cpgd(log_ratio, advantages, low, high)
        return losses.clipped_surrogate(
            log_ratio, advantages, clip_range=low, clip_high=high, dual_clip=options.dual_clip
        )

    def _clipped(self, log_ratio: Tensor) -> Tensor:
        """Return 1 for actions whose ratio is outside the range of the surrogate, else 0 `[n_actions]`."""
        options = self.arguments

        # GMPO's distances are those of log r from 0, all others' those of r from 1.
        if options.surrogate == "geometric":
            return ((log_ratio < -options.clip_range) | (log_ratio > options.clip_high)).float()

        # CISPO limits its weights from above only.
        ratio = log_ratio.exp()
        is_outside = ratio > 1 + options.clip_high
        if options.surrogate != "cispo":
            is_outside = is_outside | (ratio < 1 - options.clip_range)
        return is_outside.float()

    def _kl_penalty(self, scores: ActionScores, minibatch: Minibatch) -> Tensor | None:
        """Return coeff * KL(pi ‖ reference) of each action `[n_actions]`; None if it is not a term of the loss."""
        controller = self.kl_controller
        if controller.placement != "loss" or not self.policy.has_reference:
            return None

        # Exact estimators sum over the vocabulary, so the reference's distributions are computed here. The others only
        # need its log-probs of the sampled tokens, which the rollout has.
        if controller.estimator in WITH_DISTRIBUTIONS:
            kl = self.policy.reference_kl(minibatch.observations, scores, top_k=controller.top_k)
        else:
            kl = losses.kl_estimate(scores.log_prob, minibatch.ref_log_prob, controller.estimator)
        return controller.coeff * kl


def _check_binary(rewards: Tensor) -> None:
    """Raise a `RewardError` if a reward is neither 0 nor 1."""
    # MaxRL divides by the mean of a group as its success rate. Other rewards make no such rate: a negative mean would
    # turn the signs of all advantages around.
    not_binary = rewards[(rewards != 0) & (rewards != 1)]
    if len(not_binary):
        raise RewardError(
            f"scale: mean (maxrl) requires rewards of 0 or 1, got {float(not_binary[0]):g}: use another reward, or "
            f"another scale (grpo)"
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


_LOGGED_OF_STEP = ("policy", "entropy", "loss", "approx_kl", "clip_fraction", "minibatch_episodes", "grad_norm")
"""Names of the logged numbers of a step of `OnlineDPO`."""


class OnlineDPO(GroupPolicyGradient):
    """Direct preference optimisation of the policy's own responses (Guo et al., arXiv 2402.04792)."""

    arguments_class = arguments_of.OnlineDPOArguments
    arguments: arguments_of.OnlineDPOArguments
    learns_off_policy = False  # its loss has no weights that correct for the rollout of another policy
    n_together = 2

    def _setup_model(self) -> None:
        super()._setup_model()
        self.rollout_buffer.keeps_groups = True  # a pair is never divided between two minibatches

    def prepare_rollout(self) -> None:
        """Find the pairs: the advantage is 1 for the best response to a prompt, -1 for the worst one, else 0."""
        buffer = self.rollout_buffer
        episodes = buffer.episodes
        assert episodes is not None and episodes.group_ids is not None
        rewards = self._padded_rewards(episodes).sum(dim=1)  # [n]

        # A group whose rewards are equal up to rounding has no best response, and no pair.
        signs = torch.zeros_like(episodes.lengths)  # [n]
        has_pair = rewards_differ(rewards, episodes.group_ids)
        for group in episodes.group_ids.unique():
            rows = (episodes.group_ids == group).nonzero()[:, 0]
            best = rows[rewards[rows].argmax()]
            worst = rows[rewards[rows].argmin()]
            if has_pair[best]:
                signs[best] = 1
                signs[worst] = -1

        # Fields of a minibatch have one number per action, so a response's sign is that of all its actions.
        buffer.advantages = signs.to(torch.as_tensor(buffer.log_probs)).repeat_interleave(episodes.lengths)
        self.logger.record("train/pairs", int((signs > 0).sum()))

    def skip_minibatch(self, minibatch: Minibatch) -> Logged | None:
        """Skip a minibatch that has no pair; its logged numbers are NaN."""
        if bool(minibatch.advantages.any()):
            return None
        names = list(_LOGGED_OF_STEP)
        if self.balancing is not None:
            names.append("balancing")
        if self.ptx is not None:
            names.append("ptx")
        return dict.fromkeys(names, torch.tensor(math.nan))

    def prepare_minibatch(self, minibatch: Minibatch) -> Minibatch:
        """Return only the pairs of a minibatch, the best response of each before its worst one.

        Both have the loss of the pair for each action. With the weights of the actions, its mean is that over pairs.
        """
        episodes = minibatch.observations
        assert episodes.group_ids is not None
        signs = minibatch.advantages[episodes.lengths.cumsum(0) - 1]  # of the last action of each episode, [n]

        # Both sorted by group, so that best[k] and worst[k] respond to the same prompt.
        best = (signs == 1).nonzero()[:, 0]  # [n_pairs]
        worst = (signs == -1).nonzero()[:, 0]
        best = best[episodes.group_ids[best].argsort()]
        worst = worst[episodes.group_ids[worst].argsort()]
        minibatch = minibatch.select(torch.stack([best, worst], dim=1).flatten())

        # w = n_actions / (n_pairs |pair|): the mean of w_t L_t over actions is that of L over pairs, whatever their
        # lengths.
        pair_lengths = minibatch.observations.lengths.view(-1, 2).sum(dim=1)  # actions of both responses, [n_pairs]
        weights = int(pair_lengths.sum()) / (len(pair_lengths) * pair_lengths.float())
        return minibatch._replace(weights=weights.repeat_interleave(pair_lengths))

    def loss(self, minibatch: Minibatch) -> Objective:
        """Return the loss of its pair for each action, and the negative entropy."""
        options = self.arguments
        beta = self.kl_controller.coeff
        lengths = minibatch.observations.lengths  # [2 n_pairs]: best, worst, best, worst, ...
        scores = self.policy.action_scores(minibatch.observations)
        log_ratio = (scores.log_prob - minibatch.old_log_prob).detach()

        # l = log pi(y) - log ref(y) of a whole response: the sum over its actions.
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)  # [n_actions]
        ref_log_ratio = scores.log_prob - minibatch.ref_log_prob
        response_log_ratios = ref_log_ratio.new_zeros(len(lengths)).index_add(0, rows, ref_log_ratio)
        best, worst = response_log_ratios.view(-1, 2).unbind(dim=1)  # l_w and l_l, [n_pairs]

        if options.loss == "ipo":
            pair_losses = preference_losses.ipo_loss(best, worst, beta)
        elif options.loss == "hinge":
            pair_losses = preference_losses.hinge_loss(best, worst, beta)
        else:
            pair_losses = preference_losses.dpo_loss(best, worst, beta, options.label_smoothing)

        # Episodes 2k and 2k + 1 are pair k.
        return Objective(
            policy=pair_losses[rows // 2],
            entropy=-scores.entropy,
            log_ratio=log_ratio,
            clipped=torch.zeros_like(log_ratio),
        )
