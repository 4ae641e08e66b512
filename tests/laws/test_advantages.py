"""GAE equals the sum it abbreviates, is linear in rewards, and never looks across an episode's border."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.core.advantages import generalized_advantages, normalized
from rl4lms_like.rollouts.kl import AdaptiveKLController, FixedKLController, HorizonKLController, make_kl_controller

numbers = st.floats(-3, 3, width=32)
factors = st.floats(0, 1, width=32)


def brute_force(rewards, values, last_value, gamma, gae_lambda):
    values = [*values, last_value]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=7), numbers, factors, factors, st.integers(0, 3))
def test_gae_is_the_sum_of_discounted_errors(steps, last_value, gamma, gae_lambda, padding):
    rewards, values = (list(column) for column in zip(*steps, strict=True))
    garbage = [1e6] * padding
    mask = torch.tensor([[1] * len(steps) + [0] * padding])
    advantages, returns = generalized_advantages(
        torch.tensor([rewards + garbage], dtype=torch.float64),
        torch.tensor([values + garbage], dtype=torch.float64),
        mask,
        gamma=gamma,
        gae_lambda=gae_lambda,
        last_values=torch.tensor([last_value], dtype=torch.float64),
    )
    expected = torch.tensor(brute_force(rewards, values, last_value, gamma, gae_lambda), dtype=torch.float64)
    torch.testing.assert_close(advantages[0, : len(steps)], expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(returns[0, : len(steps)], expected + torch.tensor(values, dtype=torch.float64))
    assert not advantages[0, len(steps) :].any() and not returns[0, len(steps) :].any()


@settings(deadline=None)
@given(numbers, numbers)
def test_gae_is_linear_in_rewards(a, b):
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    zero, mask = torch.zeros(3, 5, dtype=torch.float64), torch.ones(3, 5)

    def gae(rewards):
        return generalized_advantages(rewards, zero, mask, gamma=0.9, gae_lambda=0.8)[0]

    torch.testing.assert_close(gae(a * first + b * second), a * gae(first) + b * gae(second), atol=1e-9, rtol=1e-9)


def test_normalisation_of_one_token_is_safe():
    assert torch.equal(normalized(torch.tensor([3.0])), torch.tensor([3.0]))
    assert torch.isfinite(normalized(torch.tensor([2.0, 2.0]))).all()


@given(st.floats(-3, 3), st.floats(1, 1e4), st.integers(2, 60))
def test_rounding_errors_never_become_advantages(advantage, value, length):
    """One episode with gamma = lambda = 1 and a constant value: all advantages are equal but for rounding."""
    values = torch.full((length,), value)
    returns = torch.full((length,), value + advantage)
    noise = torch.linspace(-1, 1, length) * torch.finfo(torch.float32).eps * value
    assert not normalized(returns - values + noise, returns).any()


@given(st.sampled_from([float("nan"), float("inf")]))
def test_what_is_not_finite_is_not_hidden_by_normalisation(number):
    assert not torch.isfinite(normalized(torch.tensor([1.0, number, 2.0]), torch.zeros(3))).any()


@given(st.floats(1e-6, 1e6))
def test_normalisation_does_not_depend_on_the_scale_of_rewards(scale):
    advantages = torch.tensor([0.1, -0.4, 0.7, 0.2], dtype=torch.float64)
    expected = (advantages - advantages.mean()) / advantages.std()
    torch.testing.assert_close(normalized(scale * advantages, scale * advantages), expected, atol=0.02, rtol=0.02)


@given(st.floats(0.001, 10), st.floats(-5, 50), st.floats(0.01, 1))
def test_the_kl_coefficient_moves_at_most_by_its_gain_and_rests_at_the_target(coeff, kl, gain):
    controller = AdaptiveKLController(coeff, 0.5, gain=gain)
    controller.move(kl)
    assert (1 - 0.2 * gain) * coeff - 1e-9 <= controller.coeff <= (1 + 0.2 * gain) * coeff + 1e-9
    assert (controller.coeff - coeff) * (kl - 0.5) >= 0
    resting = AdaptiveKLController(coeff, 0.5, gain=gain)
    resting.move(0.5)
    assert resting.coeff == coeff


def test_the_units_of_the_kl_target():
    kl, lengths = torch.full((6,), 0.5), torch.tensor([2, 4])  # 0.5 per token, 1.5 per sequence
    per_token, per_sequence = AdaptiveKLController(1.0, 0.5), HorizonKLController(1.0, 1.5, horizon=10)
    per_token.step(kl, lengths)
    per_sequence.step(kl, lengths)
    assert per_token.coeff == 1.0 and abs(per_sequence.coeff - 1.0) < 1e-7
    per_sequence.step(2 * kl, lengths)
    assert abs(per_sequence.coeff - (1 + 0.2 * 2 / 10)) < 1e-7


def test_which_controller_a_config_gets_and_its_limit():
    assert isinstance(make_kl_controller(0.1), FixedKLController)
    assert isinstance(make_kl_controller(0.1, 0.5, controller="fixed"), FixedKLController)
    assert isinstance(make_kl_controller(0.1, 6.0, controller="horizon"), HorizonKLController)
    assert make_kl_controller(0.5, max_coeff=0.1).coeff == 0.1
    horizon = HorizonKLController(0.1, 6.0, horizon=32)
    for _ in range(3):
        horizon.move(0.0, 256)
    assert 0 < horizon.coeff < 0.1
    adaptive = make_kl_controller(0.1, 0.5, gain=1.0, max_coeff=0.11)
    for _ in range(5):
        adaptive.move(100.0)
    assert adaptive.coeff == 0.11
    copy = make_kl_controller(0.1, 0.5)
    copy.load_state_dict(adaptive.state_dict())
    assert copy.coeff == 0.11
