"""Weights say what a mean over episodes of different lengths means."""

import pytest
import torch

from rl4lms_like.core.objective import Objective, action_weights, weighted_mean

TERM = torch.tensor([1.0, 2.0, 6.0, 4.0])
LENGTHS = torch.tensor([3, 1])


@pytest.mark.parametrize(
    ("aggregation", "norm", "expected"),
    [
        ("token_mean", None, 13 / 4),
        ("seq_mean_token_mean", None, (9 / 3 + 4) / 2),
        ("seq_mean_token_sum_norm", 5.0, (9 / 5 + 4 / 5) / 2),
    ],
)
def test_each_aggregation_is_its_definition(aggregation, norm, expected):
    weights = action_weights(LENGTHS, aggregation, norm)
    assert float(weighted_mean("policy", TERM, weights)) == pytest.approx(expected)
    assert float(weighted_mean("kl", TERM, weights)) == pytest.approx(expected)
    assert float(weighted_mean("entropy", TERM, weights)) == pytest.approx(13 / 4), "a mean over all actions"


def test_a_sum_needs_a_constant():
    with pytest.raises(ValueError):
        action_weights(LENGTHS, "seq_mean_token_sum_norm")


def test_the_mean_over_actions_is_the_plain_mean_to_the_last_bit():
    term = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        weighted_mean("policy", term, action_weights(torch.tensor([1000, 1]), "token_mean")), term.mean()
    )


def test_parts_are_joined_term_by_term():
    parts = [Objective(TERM[:3], TERM[:3], entropy=TERM[:3]), Objective(TERM[3:], TERM[3:], entropy=TERM[3:])]
    joined = Objective.joined(parts)
    assert torch.equal(joined.policy, TERM) and torch.equal(joined.entropy, TERM)
    assert joined.value is None and joined.kl is None
