"""Log-probs and entropies from hidden states equal plain autograd, in value and gradient, in every chunking."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl4lms_like.core.token_masks import pack
from rl4lms_like.core.token_scores import (
    Head,
    masked_scores_of_logits,
    masked_token_scores,
    scores_of_logits,
    token_log_probs,
    token_scores,
)


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


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("budget", [17 * 100, 17 * 4, 1])
def test_log_probs_alone_have_the_same_bytes(with_bias, budget):
    hidden, weight, bias, actions, _ = inputs(with_bias)
    head = Head(weight, bias, scale=0.4)
    log_prob, _ = token_scores(hidden, head, actions, logits_budget=budget)
    alone = token_log_probs(hidden, head, actions, logits_budget=budget)
    assert torch.equal(alone, log_prob.detach())
    assert not alone.requires_grad


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
    with pytest.raises(RuntimeError):
        log_prob.sum().backward()


def test_a_frozen_head_costs_no_gradient_of_its_size():
    """With adapters the output layer is frozen; its gradient would be as large as the layer."""
    hidden, weight, bias, actions, upstream = inputs(True)
    frozen = Head(weight.detach(), bias.detach())
    log_prob, _ = token_scores(hidden, frozen, actions, logits_budget=17 * 4)
    made = Shapes()
    with made:
        (gradient,) = torch.autograd.grad((log_prob * upstream[0]).sum(), hidden)
    assert not {tuple(weight.shape), tuple(bias.shape)} & made.fresh
    log_prob, _ = token_scores(hidden, Head(weight, bias), actions, logits_budget=17 * 4)
    torch.testing.assert_close(gradient, torch.autograd.grad((log_prob * upstream[0]).sum(), hidden)[0])


class Shapes(TorchDispatchMode):
    """The shapes of the tensors that are filled anew or summed up."""

    def __init__(self):
        super().__init__()
        self.fresh = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if any(name in func.__name__ for name in ("zeros_like", "sum", "mm")):
            self.fresh.add(tuple(output.shape))
        return output


def test_nothing_is_kept_without_gradients():
    hidden, weight, _, actions, _ = inputs(False)
    with torch.no_grad():
        log_prob, _ = token_scores(hidden, Head(weight), actions, logits_budget=10_000)
    assert log_prob.grad_fn is None


# --- chosen from a part of the vocabulary -----------------------------------------------------------------------------


def masks(actions, fraction=0.4, seed=1):
    """Random masks `[n_tokens, 17]` that allow the actions; the first token's allows nothing else."""
    allowed = torch.rand(len(actions), 17, generator=torch.Generator().manual_seed(seed)) < fraction
    allowed[0] = False
    return allowed.scatter(1, actions[:, None], True)


@pytest.mark.parametrize("budget", [17 * 100, 17 * 4, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("use_entropy", [False, True])
def test_masked_scores_are_those_of_the_allowed_logits_alone(budget, with_bias, use_entropy):
    hidden, weight, bias, actions, upstream = inputs(with_bias)
    leaves = [hidden, weight] + ([bias] if with_bias else [])
    allowed = masks(actions)
    logits = hidden @ weight.T + (0 if bias is None else bias)

    def total(log_prob, entropy):
        loss = (log_prob * upstream[0]).sum()
        return loss + (entropy * upstream[1]).sum() if use_entropy else loss

    # By hand: each token's own short vector of allowed logits, and nothing else.
    log_prob, entropy = [], []
    for row, keep, action in zip(logits, allowed, actions.tolist(), strict=True):
        log_probs = row[keep].log_softmax(0)
        log_prob.append(log_probs[keep[:action].sum()])
        entropy.append(-(log_probs.exp() * log_probs).sum())
    expected = torch.stack(log_prob), torch.stack(entropy)
    raw = logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)
    gradients = torch.autograd.grad(total(*expected), leaves, retain_graph=True)

    fused = masked_token_scores(hidden, Head(weight, bias), actions, pack(allowed), logits_budget=budget)
    plain = masked_scores_of_logits(logits, actions, pack(allowed))
    for got in (fused, plain):
        torch.testing.assert_close(got.log_prob, expected[0], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(got.entropy, expected[1], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(got.raw_log_prob, raw, atol=2e-6, rtol=2e-6)
        assert not got.raw_log_prob.requires_grad
        for mine, theirs in zip(
            torch.autograd.grad(total(got.log_prob, got.entropy), leaves, retain_graph=True), gradients, strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("scores_of", ["fused", "plain"])
def test_what_is_not_allowed_gets_no_gradient_and_nothing_is_nan(scores_of):
    """The largest logits by far are masked, and one token has no choice at all."""
    logits = torch.tensor([[200.0, 1.0, 0.0, -300.0], [500.0, 0.0, 0.0, 0.0]], requires_grad=True)
    allowed = torch.tensor([[False, True, True, False], [False, True, False, False]])
    actions = torch.tensor([2, 1])
    if scores_of == "plain":
        scores = masked_scores_of_logits(logits, actions, pack(allowed))
    else:
        scores = masked_token_scores(logits, Head(torch.eye(4)), actions, pack(allowed), logits_budget=100)
    (scores.log_prob.sum() + scores.entropy.sum()).backward()
    assert all(torch.isfinite(field).all() for field in (*scores, logits.grad))
    assert torch.equal(logits.grad[~allowed], torch.zeros(5))
    assert scores.log_prob[1].item() == scores.entropy[1].item() == 0.0
    assert float(logits.grad[0].abs().max()) > 0.1


def test_masks_that_allow_everything_change_no_bit():
    hidden, weight, _, actions, _ = inputs(False)
    everything = pack(torch.ones(11, 17).bool())
    masked = masked_token_scores(hidden, Head(weight), actions, everything, logits_budget=10_000)
    log_prob, entropy = token_scores(hidden, Head(weight), actions, logits_budget=10_000)
    assert torch.equal(masked.log_prob, log_prob) and torch.equal(masked.entropy, entropy)
    assert torch.equal(masked.raw_log_prob, log_prob)
