"""Log-prob and entropy of given tokens, and KL divergences over the vocabulary, computed from hidden states.

    hidden [n_tokens, d] ──head──> logits [n_tokens, vocab] ──> log_prob [n_tokens], entropy [n_tokens]

Only the logits of the requested tokens are computed, one chunk at a time. The backward pass is explicit, so that
the probabilities are the only stored tensor of size `[n_tokens, vocab]`. Where they would exceed the budget, they are
not stored either but recomputed in the backward pass, chunk by chunk.

With z the logits, p = softmax(z) and H = -Σ p log p, the gradient of g·log p_y + h·H with respect to z is

    (1[y] - p) g - p (log p + H) h

Where only some tokens are allowed, the same formula holds over those: p is renormalised, and 0 for all others. Their
logits become `NEVER`, a finite number, so that 0 log 0 is 0 and no gradient is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rl4lms_like.core.token_masks import unpack

NEVER = -1e30
"""Logit of a token that is not allowed."""


@dataclass(frozen=True)
class Head:
    """Language-model head, logits = scale * hidden @ weight.T + bias.

    Args:
        weight: `[vocab, d]`.
        bias: `[vocab]` or None.
        scale: factor on the product (`d ** -0.5` for T5 with tied embeddings).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits `[..., vocab]` in float32."""
        product = F.linear(hidden.float(), self.weight.float())
        if self.scale != 1.0:
            product.mul_(self.scale)
        return product if self.bias is None else product.add_(self.bias.float())


class Distributions(NamedTuple):
    """Next-token distributions of some actions.

    Args:
        states: hidden states `[n_tokens, d]`, or logits `[n_tokens, vocab]` if there is no head.
        head: language-model head of the hidden states; None for logits.
    """

    states: Tensor
    head: Head | None

    def log_probs(self, part: slice) -> Tensor:
        """Compute the log-probs `[n, vocab]` of some actions over the vocabulary."""
        states = self.states[part]
        return (states if self.head is None else self.head.logits(states)).log_softmax(dim=-1)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.states.shape[1] if self.head is None else self.head.weight.shape[0]


class MaskedScores(NamedTuple):
    """Scores `[n_tokens]` of tokens that were chosen from a part of the vocabulary.

    `log_prob` and `entropy` belong to the distribution renormalised over that part. `raw_log_prob` belongs to the
    model's full distribution and has no gradient.
    """

    log_prob: Tensor
    entropy: Tensor
    raw_log_prob: Tensor


def scores_of_logits(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-prob and entropy `[n_tokens]` from logits `[n_tokens, vocab]` with autograd (twice differentiable).

    Example:
        >>> log_prob, entropy = scores_of_logits(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        >>> round(float(log_prob), 3), round(float(entropy), 3)
        (-0.693, 0.693)
    """
    log_probs = logits.float().log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return log_probs.gather(1, actions[:, None]).squeeze(1), entropy


def masked_scores_of_logits(logits: Tensor, actions: Tensor, allowed: Tensor) -> MaskedScores:
    """Compute `scores_of_logits` over the allowed tokens.

    Args:
        logits: `[n_tokens, vocab]`.
        actions: token ids `[n_tokens]`.
        allowed: `[n_tokens, n_bytes]`, see `core.token_masks`.

    Example:
        >>> allowed = torch.tensor([[0b011]], dtype=torch.uint8)  # tokens 0 and 1
        >>> scores = masked_scores_of_logits(torch.zeros(1, 3), torch.tensor([1]), allowed)
        >>> [round(float(score), 3) for score in scores]  # log(1/2), its entropy, log(1/3)
        [-0.693, 0.693, -1.099]
    """
    logits = logits.float()
    raw_log_prob = logits.detach().log_softmax(dim=-1).gather(1, actions[:, None]).squeeze(1)
    return MaskedScores(*scores_of_logits(masked_logits(logits, allowed), actions), raw_log_prob)


def masked_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits `[n_tokens, vocab]` with those of all but the allowed tokens `[n_tokens, n_bytes]` set to `NEVER`.

    Example:
        >>> masked_logits(torch.zeros(1, 2), torch.tensor([[0b01]], dtype=torch.uint8)).softmax(dim=-1).tolist()
        [[1.0, 0.0]]
    """
    return logits.masked_fill(~unpack(allowed, logits.shape[1]), NEVER)


def token_scores(hidden: Tensor, head: Head, actions: Tensor, *, logits_budget: int) -> tuple[Tensor, Tensor]:
    """Compute log-prob and entropy of one token per hidden state.

    Args:
        hidden: `[n_tokens, d]`.
        head: language-model head that computes the logits.
        actions: token ids `[n_tokens]`.
        logits_budget: maximum number of logits in memory (a count, not bytes).

    Returns:
        Log-prob and entropy `[n_tokens]`, once differentiable with respect to hidden states and head. They are computed
        in float32 also under autocast, because the logits of many models have a large common offset. Rounding it to
        bfloat16 would cause errors of tenths of a nat.
    """
    log_prob, entropy, _ = _scored(hidden, head, actions, None, logits_budget)
    return log_prob, entropy


def masked_token_scores(
    hidden: Tensor, head: Head, actions: Tensor, allowed: Tensor, *, logits_budget: int
) -> MaskedScores:
    """Compute `token_scores` over the allowed tokens; masks are unpacked chunk by chunk.

    Args:
        hidden: `[n_tokens, d]`.
        head: language-model head that computes the logits.
        actions: token ids `[n_tokens]`.
        allowed: `[n_tokens, n_bytes]`, see `core.token_masks`.
        logits_budget: maximum number of logits in memory (a count, not bytes).
    """
    return MaskedScores(*_scored(hidden, head, actions, allowed, logits_budget))


def vocabulary_kl(
    policy: Distributions, reference: Distributions, *, top_k: int | None = None, logits_budget: int
) -> Tensor:
    """Compute KL(policy ‖ reference) of each action's distribution, differentiable with respect to the policy.

    Args:
        policy: p.
        reference: q, without gradient. Its vocabulary may have further tokens after those of the policy; p is 0 there.
        top_k: compare the k most probable tokens of the policy, and all others as if they were one token. This is a
            lower bound. Default: the whole vocabulary.
        logits_budget: maximum number of logits in memory (a count, not bytes). What does not fit is recomputed in the
            backward pass, chunk by chunk.

    Returns:
        `[n_tokens]`.

    Example:
        >>> p, q = (Distributions(torch.tensor([each]).log(), None) for each in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
        >>> [round(float(vocabulary_kl(p, q, top_k=k, logits_budget=100)), 4) for k in (None, 2, 1)]
        [0.2749, 0.2749, 0.2231]
    """
    n_tokens = len(policy.states)
    parts = _parts(n_tokens, max(logits_budget // (_KL_TENSORS * policy.vocab_size), 1))
    with torch.autocast(policy.states.device.type, enabled=False):
        if len(parts) == 1:
            return _kl_of_part(policy, reference, parts[0], top_k)
        kls = [checkpoint(_kl_of_part, policy, reference, part, top_k, use_reentrant=False) for part in parts]
    return torch.cat(kls)


_KL_TENSORS = 4
"""Tensors of the size of the logits that `_kl_of_part` has in memory at the same time."""


def _kl_of_part(policy: Distributions, reference: Distributions, part: slice, top_k: int | None) -> Tensor:
    log_p = policy.log_probs(part)
    with torch.no_grad():
        log_q = reference.log_probs(part)[:, : log_p.shape[1]].to(log_p.device)
    if top_k is not None and top_k < log_p.shape[1]:
        top = log_p.detach().topk(top_k).indices
        log_p, log_q = _with_rest(log_p, top), _with_rest(log_q, top)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _with_rest(log_probs: Tensor, top: Tensor) -> Tensor:
    """Return the log-probs of the tokens `top` `[n, k]`, and that of all others together `[n, k + 1]`."""
    rest = log_probs.scatter(1, top, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([log_probs.gather(1, top), rest], dim=1)


def _scored(
    hidden: Tensor, head: Head, actions: Tensor, allowed: Tensor | None, logits_budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    chunk = max(logits_budget // head.weight.shape[0], 1)
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenScores.apply(hidden.float(), head.weight, head.bias, head.scale, actions, chunk, allowed)


class _TokenScores(torch.autograd.Function):
    """Autograd function of `token_scores` and `masked_token_scores`; without masks the raw log-prob is empty."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        actions: Tensor,
        chunk: int,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(weight, bias, scale)
        n_tokens = len(actions)
        log_prob, entropy = (hidden.new_empty(n_tokens, dtype=torch.float32) for _ in range(2))
        raw_log_prob = hidden.new_empty(0 if allowed is None else n_tokens, dtype=torch.float32)
        keep = n_tokens <= chunk and any(ctx.needs_input_grad[:3])
        ctx.probs = None
        for part in _parts(n_tokens, chunk):
            logits = head.logits(hidden[part])
            if allowed is not None:
                raw_log_prob[part] = _log_prob(logits, actions[part])
            probs, log_prob[part], entropy[part] = _softmax(logits, actions[part], _part_of(allowed, part))
            if keep:
                ctx.probs = probs
        ctx.save_for_backward(hidden, weight, bias, actions, entropy, allowed)
        ctx.scale, ctx.chunk, ctx.kept = scale, chunk, keep
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(raw_log_prob)
        return log_prob, entropy, raw_log_prob

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy, _ = gradients
        hidden, weight, bias, actions, entropy, allowed = ctx.saved_tensors
        if ctx.kept and ctx.probs is None:
            raise RuntimeError("token_scores: the graph was freed by its first backward pass")
        head = Head(weight, bias, ctx.scale)
        whole = len(actions) <= ctx.chunk
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] and not whole else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part in _parts(len(actions), ctx.chunk):
            probs = ctx.probs
            if probs is None:
                probs, _, _ = _softmax(head.logits(hidden[part]), actions[part], _part_of(allowed, part))
            ctx.probs = None  # `_logit_gradient` overwrites them
            grad = _logit_gradient(
                probs,
                actions[part],
                None if grad_log_prob is None else grad_log_prob[part],
                None if grad_entropy is None else grad_entropy[part],
                entropy[part],
            )
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.mul_(ctx.scale) if ctx.scale != 1.0 else grad
            torch.mm(grad, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                product = grad.T @ hidden[part]
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _parts(n_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n_tokens)) for start in range(0, n_tokens, chunk)]


def _part_of(allowed: Tensor | None, part: slice) -> Tensor | None:
    return None if allowed is None else allowed[part]


def _log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Compute log-prob `[n]` with the operations of `_softmax`, so that both agree bit by bit if all is allowed."""
    shifted = logits - logits.amax(dim=1, keepdim=True)
    chosen = shifted.gather(1, actions[:, None]).squeeze(1)
    return chosen - shifted.exp_().sum(dim=1, keepdim=True).squeeze(1).log()


def _softmax(logits: Tensor, actions: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute probabilities `[n, vocab]`, log-prob and entropy `[n]`, one exponential per logit; overwrite logits."""
    if allowed is not None:
        logits.masked_fill_(~unpack(allowed, logits.shape[1]), NEVER)
    logits -= logits.amax(dim=1, keepdim=True)
    probs = logits.exp()
    norm = probs.sum(dim=1, keepdim=True)
    log_norm = norm.squeeze(1).log()
    probs /= norm
    mean_logit = torch.bmm(probs[:, None, :], logits[:, :, None]).view(-1)
    log_prob = logits.gather(1, actions[:, None]).squeeze(1) - log_norm
    return probs, log_prob, log_norm - mean_logit


def _logit_gradient(
    probs: Tensor, actions: Tensor, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Compute the gradient formula of the module docstring, in place in `probs`."""
    g = torch.zeros_like(entropy) if grad_log_prob is None else grad_log_prob
    if grad_entropy is None or not bool(grad_entropy.any()):
        grad = probs.mul_(-g[:, None])
    else:
        log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log_()
        factor = log_probs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(g[:, None])
        grad = probs.mul_(factor).neg_()
    grad[torch.arange(len(actions), device=actions.device), actions] += g
    return grad
