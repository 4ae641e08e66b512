"""`check_algorithm` lets a good algorithm pass, and says what is wrong with one that is not."""

from __future__ import annotations

import pytest
import stable_baselines3
import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.testing import check_algorithm

FIXED = {"gae_lambda": 1.0, "gamma": 1.0, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}


class TenLines(OnPolicyAlgorithm):
    """A user's algorithm on Stable-Baselines3's base class: REINFORCE with a baseline."""

    def __init__(self, policy, env, learning_rate=1e-3, n_steps=16, **kwargs):
        super().__init__(policy, env, learning_rate, n_steps, use_sde=False, sde_sample_freq=-1, **FIXED, **kwargs)

    def train(self):
        for batch in self.rollout_buffer.get(64):
            self.step(batch)

    def step(self, batch):
        values, log_prob, _ = self.policy.evaluate_actions(batch.observations, batch.actions)
        self.descend(-(log_prob * batch.advantages).mean() + (values - batch.returns).square().mean())

    def descend(self, loss):
        self.policy.optimizer.zero_grad()
        loss.backward()
        self.policy.optimizer.step()


class Idle(TenLines):
    def descend(self, loss):
        pass


class CriticOnly(TenLines):
    def step(self, batch):
        values, _, _ = self.policy.evaluate_actions(batch.observations, batch.actions)
        self.descend((values - batch.returns).square().mean())


class Diverges(TenLines):
    def descend(self, loss):
        super().descend(loss * float("nan"))


class StepsFirst(TenLines):
    def train(self):
        with torch.no_grad():
            for weight in self.policy.policy_model.parameters():
                weight.mul_(0.5)
        super().train()


class MovesTheReference(TenLines):
    def train(self):
        super().train()
        with torch.no_grad():
            next(iter(self.policy.ref_model.parameters())).add_(1.0)


class Unseeded(TenLines):
    def step(self, batch):
        torch.seed()
        noise = torch.rand(())
        values, log_prob, _ = self.policy.evaluate_actions(batch.observations, batch.actions)
        self.descend(-(log_prob * batch.advantages * noise).mean() + (values - batch.returns).square().mean() * noise)


class Patches(TenLines):
    def train(self):
        super().train()
        own = type(self.policy).evaluate_actions
        type(self.policy).evaluate_actions = lambda *args: own(*args)


class OtherObjective(TenLines):
    """Only the signs of advantages count."""

    def step(self, batch):
        super().step(batch._replace(advantages=batch.advantages.sign()))


class ReadsTheModel(TenLines):
    def step(self, batch):
        next(self.policy.policy_model.parameters())
        super().step(batch)


class Crashes(TenLines):
    def train(self):
        raise ZeroDivisionError("no update today")


class WithoutARollout(TenLines):
    def train(self):
        pass


@pytest.mark.parametrize("algorithm", [TenLines, stable_baselines3.PPO, stable_baselines3.A2C])
def test_good_algorithms_pass(algorithm):
    check_algorithm(algorithm)


@pytest.mark.parametrize("algorithm", [OtherObjective, ReadsTheModel])
def test_exact_gradients_are_optional(algorithm):
    check_algorithm(algorithm, families=("causal",), exact=False)


def test_an_algorithm_is_compared_with_another_implementation():
    options = {"families": (), "exact": False, "normalize_advantage": True, "gae_lambda": 1.0}
    check_algorithm(stable_baselines3.PPO, like=PPO, **options)
    with pytest.raises(AssertionError, match=r"PPO on a tabular policy \(like\): .* A2C with other ratios than 1"):
        check_algorithm(stable_baselines3.PPO, like=A2C, **options)


@pytest.mark.parametrize(
    ("algorithm", "data"),
    [
        (Idle, "Idle on a causal model: .*policy"),
        (CriticOnly, "CriticOnly .*policy"),
        (Diverges, "Diverges .*finite"),
        (StepsFirst, "StepsFirst .*ratio"),
        (MovesTheReference, "MovesTheReference .*reference model"),
        (Unseeded, "Unseeded .*seed"),
        (Patches, "evaluate_actions"),
        (OtherObjective, r"OtherObjective on a tabular policy \(reward\): .*exact=False"),
        (ReadsTheModel, "ReadsTheModel on a tabular policy: AttributeError: .*exact=False"),
        (Crashes, "Crashes .*: ZeroDivisionError: no update today"),
        (WithoutARollout, "rollout_buffer"),
    ],
)
def test_bad_algorithms_are_told_why(algorithm, data, monkeypatch):
    from rl4lms_like.policies.base import CausalLMActorCriticPolicy

    if algorithm is Patches:  # put back afterwards
        monkeypatch.setattr(CausalLMActorCriticPolicy, "evaluate_actions", CausalLMActorCriticPolicy.evaluate_actions)
    with pytest.raises(AssertionError, match=data):
        check_algorithm(algorithm, families=("causal",))
