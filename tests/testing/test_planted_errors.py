"""`check_algorithm` finds errors that are known from other libraries, planted in subclasses, and names their cause."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from rl4lms_like.algorithms import critic_free_arguments
from rl4lms_like.algorithms.nlpo import NLPO
from rl4lms_like.algorithms.policy_gradient import GRPO
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.sao import SAO
from rl4lms_like.testing import check_algorithm


class WithOtherScores(PPO):
    """Base of errors in the scores of a rollout."""

    def _make_collector(self, env):
        collector = super()._make_collector(env)
        score = collector.score
        collector.score = lambda episodes: self.changed(score(episodes))
        return collector


class KLInTheLoss(WithOtherScores):
    """The estimate k1 is a term of the loss, not of the reward: its expected gradient is 0."""

    def changed(self, scores):
        return scores._replace(ref_log_prob=scores.raw_log_prob)

    def loss(self, minibatch):
        objective = super().loss(minibatch)
        log_prob = self.policy.action_scores(minibatch.observations).log_prob
        reference = self.policy.score(minibatch.observations).ref_log_prob
        return objective._replace(kl=self.kl_controller.coeff * (log_prob - reference))


class StaleReference(WithOtherScores):
    """The log-probs of the reference are those of the first rollout."""

    first = None

    def changed(self, scores):
        if self.first is None:
            self.first = scores.ref_log_prob
        return scores._replace(ref_log_prob=self.first[: len(scores.ref_log_prob)])


class KLAfterTheMask(NLPO, WithOtherScores):
    """The KL is that of the distributions over the allowed tokens."""

    def changed(self, scores):
        return scores._replace(raw_log_prob=scores.log_prob)


class LogProbsOffByOne(PPO):
    """The log-prob of a token is multiplied with the advantage of the next one."""

    def loss(self, minibatch):
        return super().loss(minibatch._replace(advantages=minibatch.advantages.roll(1)))


class MeanOfMeans(PPO):
    """Micro-batches are averaged, whatever their number of tokens."""

    def micro_losses(self, minibatch, micro_batch_size):
        parts = list(super().micro_losses(minibatch, micro_batch_size))
        for loss, objective in parts:
            fraction = len(objective.policy) / len(minibatch.actions)
            yield loss / fraction / len(parts), objective


class RejectedInTheDenominator(SAO):
    """Tokens outside the band have no loss, but count in the mean."""

    def prepare_minibatch(self, minibatch):
        return super().prepare_minibatch(minibatch)._replace(fraction_in_band=torch.ones(()))


class Normalized(PPO):
    """Base of errors in the normalization."""

    @property
    def normalization(self):
        return None

    def prepare_minibatch(self, minibatch):
        if self.arguments.normalize_advantage:
            minibatch = minibatch._replace(advantages=self.normalized(minibatch))
        return super().prepare_minibatch(minibatch)


class UnderTheWrongMask(Normalized):
    """Observed tokens count in the mean and the standard deviation, with advantages of 0."""

    def normalized(self, minibatch):
        episodes = minibatch.observations
        every = episodes.pad(minibatch.advantages)[episodes.response_mask]
        return (minibatch.advantages - every.mean()) / (every.std() + 1e-8)


class MaskOfIds(Normalized):
    """The mean and the standard deviation are those of the tokens that differ from the padding's id."""

    def normalized(self, minibatch):
        episodes = minibatch.observations
        every = episodes.pad(minibatch.advantages)[episodes.response_ids != 0]
        return (minibatch.advantages - every.mean()) / (every.std() + 1e-8)


class WrongEpsilon(Normalized):
    """Another epsilon is added to the standard deviation."""

    def normalized(self, minibatch):
        return (minibatch.advantages - minibatch.advantages.mean()) / (minibatch.advantages.std() + 1e-3)


class BiasedDeviation(Normalized):
    """The sum of squares is divided by n, not n - 1."""

    def normalized(self, minibatch):
        return (minibatch.advantages - minibatch.advantages.mean()) / (minibatch.advantages.std(correction=0) + 1e-8)


class TargetsOfThePolicy(PPO):
    """The critic's targets have the lambda of the advantages."""

    def loss(self, minibatch):
        return super().loss(minibatch._replace(returns=minibatch.advantages + minibatch.old_values))


class ObservedAreActions(PPO):
    """Observed tokens have advantages too, of 0, so that those of later actions are shifted."""

    def loss(self, minibatch):
        episodes = minibatch.observations
        every = episodes.pad(minibatch.advantages)[episodes.response_mask]
        return super().loss(minibatch._replace(advantages=every[: len(minibatch.actions)]))


class MixedGroups(GRPO):
    """The groups of each generation batch have the same ids, so that their rewards are compared."""

    def prepare_rollout(self):
        buffer = self.rollout_buffer
        n_groups = self.env.num_envs // self.arguments.group_size
        buffer.episodes = replace(buffer.episodes, group_ids=buffer.episodes.group_ids % n_groups)
        super().prepare_rollout()


class WithoutEpsilon(GRPO):
    """Nothing is added to the standard deviation of a group."""

    def prepare_rollout(self):
        with mock.patch.object(critic_free_arguments, "EPS", 0.0):
            super().prepare_rollout()


LIKE_PPO = {"like": PPO}
PLANTED = {
    KLInTheLoss: ("KL penalty", {}),
    StaleReference: ("KL penalty", {}),
    KLAfterTheMask: ("KL penalty", {}),
    LogProbsOffByOne: ("reward", {}),
    MeanOfMeans: ("micro_batch_size", {}),
    RejectedInTheDenominator: ("like", {"like": SAO, "ratio_band": (0.5, 2.0)}),
    UnderTheWrongMask: ("like", LIKE_PPO),
    MaskOfIds: ("padding", {}),
    WrongEpsilon: ("like", LIKE_PPO),
    BiasedDeviation: ("like", LIKE_PPO),
    ObservedAreActions: ("observed tokens", {}),
    TargetsOfThePolicy: ("critic", {}),
    MixedGroups: ("generation batches", {}),
    WithoutEpsilon: ("like", {"like": GRPO}),
}
"""Planted error, the check that finds it, and the arguments of `check_algorithm`."""


@pytest.mark.parametrize("algorithm", PLANTED)
def test_a_planted_error_is_found(algorithm):
    case, options = PLANTED[algorithm]
    with pytest.raises(AssertionError, match=rf"{algorithm.__name__} on a tabular policy \({case}\)"):
        check_algorithm(algorithm, families=(), **options)
