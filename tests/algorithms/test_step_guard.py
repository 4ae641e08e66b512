"""Steps whose loss or gradient is no finite number: the weights never see them."""

from __future__ import annotations

import math

import pytest
import torch

from rl4lms_like.algorithms.a2c import A2C
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.algorithms.ppo import PPO
from rl4lms_like.algorithms.step_guard import StepGuard
from rl4lms_like.algorithms.trpo import TRPO
from rl4lms_like.system.errors import ModelError
from tests.algorithms.test_update import build, parameters


@pytest.fixture
def spoiled(monkeypatch):
    """Makes the losses of chosen calls not finite, from the first on if none is named."""

    def spoil(algorithm, value, *calls):
        original, counted = type(algorithm).total_loss, []

        def total(self, *terms):
            counted.append(1)
            found = original(self, *terms)
            return found * value if not calls or len(counted) in calls else found

        monkeypatch.setattr(type(algorithm), "total_loss", total)

    return spoil


def skipping(algorithm, model_dir, tokenizer, **arguments):
    built = build(algorithm, model_dir, tokenizer, non_finite="skip", **arguments)
    built.learn_iteration(0, 9)
    return built


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_is_left_out_and_the_others_are_taken(value, spoiled, tiny_gpt2_dir, tiny_tokenizer):
    built = skipping(PPO, tiny_gpt2_dir, tiny_tokenizer, micro_batch_size=None)
    before, n_updates = parameters(built), built._n_updates
    assert built.logger.name_to_value["train/skipped_steps"] == 0
    spoiled(built, value, 3)  # each minibatch asks twice: for its gradient, and for what is logged
    built.learn_iteration(1, 9)
    logged = built.logger.name_to_value
    assert logged["train/skipped_steps"] == 1 and built._n_updates > n_updates
    assert torch.isfinite(parameters(built)).all() and not torch.equal(before, parameters(built))
    assert all(math.isfinite(logged[key]) for key in ("ppo/loss", "ppo/value_loss", "train/grad_norm"))


def test_a_run_that_goes_on_counts_on(spoiled, tiny_gpt2_dir, tiny_tokenizer):
    built = skipping(PPO, tiny_gpt2_dir, tiny_tokenizer, micro_batch_size=None)
    spoiled(built, math.nan, 1)
    built.learn_iteration(1, 9)
    later = build(PPO, tiny_gpt2_dir, tiny_tokenizer, non_finite="skip")
    later.load_training_state(built.training_state())
    assert later.guard.skipped == 1 and later.guard.state_dict() == built.guard.state_dict()


def test_a_loss_that_is_no_number_is_seen_where_its_gradient_is_one(monkeypatch, tiny_gpt2_dir, tiny_tokenizer):
    built = build(A2C, tiny_gpt2_dir, tiny_tokenizer)
    original = A2C.loss
    infinite = torch.tensor(math.inf)
    monkeypatch.setattr(A2C, "loss", lambda *given: (terms := original(*given))._replace(value=terms.value + infinite))
    with pytest.raises(ModelError, match=r" inf .* \d"):
        built.learn_iteration(0, 9)


def test_left_out_steps_leave_weights_and_optimizer_alone(spoiled, tiny_gpt2_dir, tiny_tokenizer):
    built = skipping(A2C, tiny_gpt2_dir, tiny_tokenizer)
    before = parameters(built)
    moments = [state["square_avg"].clone() for state in built.policy.optimizer.state.values()]
    spoiled(built, math.nan)
    built.learn_iteration(1, 9)
    assert torch.equal(before, parameters(built))
    after = [state["square_avg"] for state in built.policy.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert all(parameter.grad is None for parameter in built.policy.parameters())


@pytest.mark.parametrize(("algorithm", "updates"), [(PPO, 1), (A2C, 2)])
def test_a_run_ends_when_all_of_an_update_is_left_out(algorithm, updates, spoiled, tiny_gpt2_dir, tiny_tokenizer):
    """Of an update with one step, one may be left out."""
    built = skipping(algorithm, tiny_gpt2_dir, tiny_tokenizer)
    before = parameters(built)
    spoiled(built, math.nan)
    for iteration in range(1, updates):
        built.learn_iteration(iteration, 9)
    with pytest.raises(ModelError):
        built.learn_iteration(updates, 9)
    assert torch.equal(before, parameters(built))


def test_trpo_leaves_out_the_policys_step_and_takes_the_critics(spoiled, tiny_gpt2_dir, tiny_tokenizer):
    built = skipping(TRPO, tiny_gpt2_dir, tiny_tokenizer, n_critic_updates=2)
    actor = torch.cat([p.detach().flatten() for p in built.policy.policy_model.parameters()])
    critic = torch.cat([p.detach().flatten() for p in built.policy.value_model.parameters()])
    spoiled(built, math.nan)
    built.learn_iteration(1, 9)
    assert torch.equal(actor, torch.cat([p.detach().flatten() for p in built.policy.policy_model.parameters()]))
    assert not torch.equal(critic, torch.cat([p.detach().flatten() for p in built.policy.value_model.parameters()]))
    logged = built.logger.name_to_value
    assert (logged["train/skipped_steps"], logged["trpo/line_search_success"]) == (1, 0)


def test_without_the_key_the_run_stops(spoiled, tiny_gpt2_dir, tiny_tokenizer):
    built: OnPolicyTextAlgorithm = build(PPO, tiny_gpt2_dir, tiny_tokenizer)
    spoiled(built, math.nan)
    before = parameters(built)
    with pytest.raises(ModelError):
        built.learn_iteration(0, 9)
    assert torch.equal(before, parameters(built))
    assert "train/skipped_steps" not in built.logger.name_to_value


def test_what_was_left_out_goes_with_the_run(tiny_gpt2_dir, tiny_tokenizer):
    built = build(PPO, tiny_gpt2_dir, tiny_tokenizer, non_finite="skip")
    built.guard.accepts(False, "the loss is nan in update 7", "")
    again = build(PPO, tiny_gpt2_dir, tiny_tokenizer, non_finite="skip")
    again.load_training_state(built.training_state())
    assert vars(again.guard) == vars(built.guard) and again.guard.skipped == 1


def test_good_steps_between_left_out_ones_keep_a_run_going():
    guard = StepGuard("skip")
    for finite in (False, True, False):
        guard.accepts(finite, "found", "way out")
    guard.end_update(3)
    assert (guard.skipped, guard.in_a_row) == (2, 1)
