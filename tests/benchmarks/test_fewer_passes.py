"""The fused layers of the benchmark are transformers' functions, and its numbers are those of the curves."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.fewer_passes import iterations_until, measures, relative_costs
from benchmarks.pass_costs import RMSNorm, SwiGLU


def test_the_fused_norm_is_transformers_norm_with_its_gradients():
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    norm = LlamaRMSNorm(8, eps=0.1).float()
    norm.weight.data = weight.detach().float()
    torch.testing.assert_close(RMSNorm.apply(x, weight, 0.1).float(), norm(x.float()))
    assert torch.autograd.gradcheck(lambda x, weight: RMSNorm.apply(x, weight, 0.1), (x, weight))


def test_the_fused_activation_is_silu_times_up_with_its_gradients():
    gate, up = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(SwiGLU.apply(gate, up), gate / (1 + (-gate).exp()) * up)
    assert torch.autograd.gradcheck(SwiGLU.apply, (gate, up))


def test_rewards_are_compared_at_equal_kl_and_times_in_iterations_of_today():
    held_out = [0.1, 0.6, 0.75, *[0.8] * 8, 0.9, 0.5, 0.84]  # one more than iterations
    kl = [0.0, 0.05, 0.1, *[0.1] * 8, 0.11, 0.2]  # the last policy's is too large
    run = {"held_out": held_out, "kl": kl, "explained_variance": [0.5] * 13}
    columns = measures([run], cost=0.5)
    assert columns["iterations to 0.7"] == [2] and columns["time to 0.7"] == [1.0]
    assert columns["held-out at equal KL"] == [pytest.approx((0.8 + 0.9) / 2)]  # of iterations 11 and 12
    assert (
        iterations_until(0.95, run) == math.inf and measures([run | {"held_out": [0.0] * 14}], 1)["time to 0.7"] == []
    )


def test_a_cost_is_the_median_of_ratios_within_a_round():
    costs = relative_costs({"today": [1.0, 2.0, 4.0], "shared": [0.5, 1.8, 2.0]})
    assert costs == {"today": 1.0, "shared": 0.5}
