"""Log-probs and entropies from hidden states equal plain autograd, in value and gradient, in every chunking."""

import pytest
import torch

from rl4lms_like.core.token_scores import Head, scores_of_logits, token_scores


def inputs(with_bias: bool, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(11, 6, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(17, 6, generator=generator, requires_grad=True)
    bias = torch.randn(17, generator=generator, requires_grad=True) if with_bias else None
    actions = torch.randint(0, 17, (11,), generator=generator)
    upstream = torch.randn(2, 11, generator=generator)
    return hidden, weight, bias, actions, upstream


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("budget", [17 * 100, 17 * 4, 1])
@pytest.mark.parametrize("use_entropy", [False, True])
def test_equals_plain_autograd_in_value_and_gradient(with_bias, scale, budget, use_entropy):
    hidden, weight, bias, actions, upstream = inputs(with_bias)
    leaves = [hidden, weight] + ([bias] if with_bias else [])

    logits = scale * hidden @ weight.T + (0 if bias is None else bias)
    expected = scores_of_logits(logits, actions)
    got = token_scores(hidden, Head(weight, bias, scale), actions, logits_budget=budget)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)

    def total(scores):
        loss = (scores[0] * upstream[0]).sum()
        return loss + (scores[1] * upstream[1]).sum() if use_entropy else loss

    for mine, theirs in zip(
        torch.autograd.grad(total(got), leaves), torch.autograd.grad(total(expected), leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=5e-6, rtol=5e-6)


def test_huge_logits_stay_finite():
    hidden = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.999, 0.0], [-1.0, 1.0]], requires_grad=True)
    log_prob, entropy = token_scores(hidden, Head(weight), torch.tensor([2]), logits_budget=100)
    (log_prob.sum() + entropy.sum()).backward()
    assert torch.isfinite(log_prob).all() and torch.isfinite(entropy).all()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_a_second_backward_pass_says_that_the_graph_is_gone():
    hidden, weight, _, actions, _ = inputs(False)
    log_prob, _ = token_scores(hidden, Head(weight), actions, logits_budget=10_000)
    log_prob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward"):
        log_prob.sum().backward()


def test_nothing_is_kept_without_gradients():
    hidden, weight, _, actions, _ = inputs(False)
    with torch.no_grad():
        log_prob, _ = token_scores(hidden, Head(weight), actions, logits_budget=10_000)
    assert log_prob.grad_fn is None
