"""The expected gradient of an algorithm's first step is the exact gradient of what it says that it optimizes.

All responses (or all batches of two) are enumerated on a tabular policy in float64. `objective` is the exact value of

    E[R] - beta KL(policy || reference)

with the KL of whole responses, whose gradient is the expected one of the reward R - beta k1.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.sao import SAO
from rl4lms_like.algorithms.vapo import VAPO
from rl4lms_like.core.losses import kl_estimate
from rl4lms_like.testing.tabular import LENGTH, Enumeration, all_responses, episodes_of, responses_of

EXACT = {"gamma": 1.0, "gae_lambda": 1.0, "normalize_advantage": False}
CASES = {
    "ppo": (PPO, {}),
    "a2c": (A2C, {}),
    "vapo": (VAPO, {"gae_length_alpha": None, "critic_pretrain": None, "nll_coef": 0.0}),
    "sao": (SAO, {"critic_only_iterations": 0}),
}


def reward(prompt, response):
    return (sum((place + 1) * token for place, token in enumerate(response)) + prompt) / 8


def terms(policy, prompt, estimator, ends=False):
    """Per response: its log-prob, its reward, its KL estimate, and its number of tokens."""
    for response in all_responses(ends=ends):
        episodes = episodes_of([prompt], [response])
        log_prob = policy.action_scores(episodes).log_prob
        kl = kl_estimate(log_prob, policy.score(episodes).ref_log_prob, estimator)
        yield log_prob, reward(prompt, response), kl, len(response)


def exact(policy, value):
    policy.zero_grad()
    value.backward()
    return policy.logits.grad, policy.values.grad


def assert_equal(found, expected):
    size = float(expected.abs().max())
    assert size > 1e-3
    assert float((found - expected).abs().max()) < 1e-6 * size


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_expected_gradient_is_that_of_the_reward_with_its_penalty(case, estimator):
    """With lambda 1 the critic is a baseline. The penalty is a reward, so it has no gradient itself."""
    algorithm, arguments = CASES[case]
    run = Enumeration(algorithm, reward, kl_coeff=0.3, estimator=estimator, **EXACT, **arguments)
    found = run.expected()
    total = sum(
        log_prob.sum().exp() * (paid - 0.3 * kl.sum().detach())
        for log_prob, paid, kl, _ in terms(run.policy, 0, estimator)
    )
    assert_equal(found.logits, -exact(run.policy, total)[0] / LENGTH)


def test_with_k1_it_is_the_gradient_of_the_exact_kl_too():
    run = Enumeration(PPO, reward, kl_coeff=0.3, **EXACT)
    found = run.expected()
    total = sum(log_prob.sum().exp() * (paid - 0.3 * kl.sum()) for log_prob, paid, kl, _ in terms(run.policy, 0, "k1"))
    assert_equal(found.logits, -exact(run.policy, total)[0] / LENGTH)


def test_two_responses_are_a_mean():
    run = Enumeration(PPO, reward, prompts=(0, 1), **EXACT)
    found = run.expected()
    total = sum(
        log_prob.sum().exp() * paid for prompt in (0, 1) for log_prob, paid, *_ in terms(run.policy, prompt, "k1")
    )
    assert_equal(found.logits, -exact(run.policy, total)[0] / (2 * LENGTH))


@pytest.mark.parametrize("case", CASES)
def test_the_critic_learns_the_expected_return(case):
    algorithm, arguments = CASES[case]
    run = Enumeration(algorithm, reward, **EXACT, **arguments)
    found = run.expected()
    total = 0.0
    for episodes, probability in run.batches():
        errors = (run.policy.predict_values(episodes) - reward(0, responses_of(episodes)[0])).square()
        total = total + probability * 0.5 * errors.mean()
    assert_equal(found.values, exact(run.policy, total)[1])


# --- what depends on the batch, or is biased: the exact expectation of the stated loss -------------------------------


def estimates(rewards, values, gamma, gae_lambda):
    """Advantages of one episode, by their definition."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum((gamma * gae_lambda) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


class Stated:
    """The stated loss of any batch, from the log-probs and values of each possible response.

    Args:
        run: its policy.
        policy_lambda: lambda of the advantages, a function of an episode's length.
    """

    def __init__(self, run, *, gamma, policy_lambda, value_lambda, normalize=False, sequence_mean=False, nll=0.0):
        self.normalize, self.sequence_mean, self.nll = normalize, sequence_mean, nll
        self.parts = {}
        for prompt, response in itertools.product(run.prompts, all_responses(ends=True)):
            episodes = episodes_of([prompt], [response])
            scores = run.policy.score(episodes)
            rewards = [-0.3 * float(k) for k in scores.log_prob - scores.ref_log_prob]
            rewards[-1] += reward(prompt, response)
            values = scores.values.tolist()
            advantages = estimates(rewards, values, gamma, policy_lambda(len(response)))
            targets = torch.tensor(estimates(rewards, values, gamma, value_lambda)) + scores.values
            errors = (run.policy.predict_values(episodes) - targets).square()
            log_prob = run.policy.action_scores(episodes).log_prob
            good = torch.full(log_prob.shape, reward(prompt, response) >= 1.0)
            lengths = torch.full(log_prob.shape, float(len(response)))
            self.parts[prompt, response] = (log_prob, torch.tensor(advantages), errors, good, lengths)

    def loss(self, prompts, responses):
        parts = [self.parts[each] for each in zip(prompts, responses, strict=True)]
        log_prob, advantages, errors, good, lengths = (torch.cat(field) for field in zip(*parts, strict=True))
        if self.normalize:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        per_action = 1 / (len(prompts) * lengths) if self.sequence_mean else 1 / len(log_prob)
        total = -(per_action * advantages * log_prob).sum() + 0.5 * errors.mean()
        return total - self.nll * log_prob[good].mean() if self.nll and bool(good.any()) else total


class SequenceMean(PPO):
    loss_aggregation = "seq_mean_token_mean"


STATED = {
    "lambda": (PPO, {"gae_lambda": 0.9, "gamma": 0.95, "normalize_advantage": False}, {}),
    "normalized": (PPO, {"normalize_advantage": "rollout"}, {"normalize": True}),
    "normalized in minibatches": (PPO, {"normalize_advantage": True}, {"normalize": True}),
    "separate lambdas": (
        PPO,
        {"gae_lambda": 0.5, "value_gae_lambda": 1.0, "normalize_advantage": False},
        {"policy_lambda": lambda length: 0.5, "value_lambda": 1.0},
    ),
    "adaptive lambda": (
        PPO,
        {"gae_length_alpha": 0.7, "normalize_advantage": False},
        {"policy_lambda": lambda length: max(0.0, 1 - 1 / (0.7 * length))},
    ),
    "mean over sequences": (SequenceMean, {"normalize_advantage": False}, {"sequence_mean": True}),
    "likelihood": (PPO, {"normalize_advantage": False, "nll_coef": 0.5, "nll_threshold": 1.0}, {"nll": 0.5}),
    "a2c": (A2C, {"gae_lambda": 0.8, "normalize_advantage": True}, {"normalize": True}),
}


@contextmanager
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def both(algorithm, arguments, stated):
    """Expected gradients of the algorithm and of the stated loss, on two responses of different lengths."""
    run = Enumeration(algorithm, reward, prompts=(0, 1), ends=True, kl_coeff=0.3, **arguments)
    options = run.algorithm.arguments
    own = options.gae_lambda
    complete = {"gamma": options.gamma, "policy_lambda": lambda length: own, "value_lambda": own, **stated}
    with float64():
        stated = Stated(run, **complete)
        losses = [p * stated.loss(run.prompts, responses_of(episodes)) for episodes, p in run.batches()]
        return run.expected(), exact(run.policy, torch.stack(losses).sum())


@pytest.mark.parametrize("case", STATED)
def test_the_expected_gradient_is_that_of_the_stated_loss(case):
    found, (logits, values) = both(*STATED[case])
    assert_equal(found.logits, logits)
    assert_equal(found.values, values)


# --- known bugs of other libraries are found ------------------------------------------------------------------------


class KLInTheLoss(PPO):
    """The penalty k1 as a term of the loss: its expected gradient is 0."""

    def loss(self, minibatch):
        objective = super().loss(minibatch)
        scores = self.policy.action_scores(minibatch.observations)
        reference = self.policy.score(minibatch.observations).ref_log_prob
        return objective._replace(kl=0.3 * (scores.log_prob - reference))


class OffByOne(PPO):
    """The advantage of a token belongs to the one before."""

    def loss(self, minibatch):
        return super().loss(minibatch._replace(advantages=minibatch.advantages.roll(1)))


class MeanOfMeans(PPO):
    """Micro-batches are averaged, whatever their number of tokens."""

    def _micro_losses(self, minibatch, micro_batch_size):
        parts = list(super()._micro_losses(minibatch, micro_batch_size))
        for loss, objective in parts:
            fraction = len(objective.policy) / len(minibatch.actions)
            yield loss / fraction / len(parts), objective


class WrongEpsilon(PPO):
    """The standard deviation is divided by with another epsilon."""

    def _prepared(self, minibatch):
        advantages = minibatch.advantages
        return minibatch._replace(advantages=(advantages - advantages.mean()) / (advantages.std() + 0.1))


class BiasedDeviation(PPO):
    """The standard deviation is divided by n, not n - 1."""

    def _prepared(self, minibatch):
        advantages = minibatch.advantages
        return minibatch._replace(advantages=(advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8))


PLANTED = {
    "rewards under the wrong token": (OffByOne, {"normalize_advantage": False}, {}),
    "mean of micro-batch means": (MeanOfMeans, {"normalize_advantage": False, "micro_batch_size": 1}, {}),
    "wrong epsilon": (WrongEpsilon, {"normalize_advantage": False}, {"normalize": True}),
    "biased deviation": (BiasedDeviation, {"normalize_advantage": False}, {"normalize": True}),
    "value targets with the policy's lambda": (
        PPO,
        {"gae_lambda": 0.5, "normalize_advantage": False},
        {"policy_lambda": lambda length: 0.5, "value_lambda": 1.0},
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug):
    found, (logits, values) = both(*PLANTED[bug])
    with pytest.raises(AssertionError):
        assert_equal(found.logits, logits)
        assert_equal(found.values, values)


def test_a_penalty_in_the_loss_is_found():
    run = Enumeration(KLInTheLoss, reward, **EXACT)
    found = run.expected()
    total = sum(log_prob.sum().exp() * (paid - 0.3 * kl.sum()) for log_prob, paid, kl, _ in terms(run.policy, 0, "k1"))
    with pytest.raises(AssertionError):
        assert_equal(found.logits, -exact(run.policy, total)[0] / LENGTH)
