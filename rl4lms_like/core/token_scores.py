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

from rl4lms_like.core.products import linear
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
        onednn: compute the product by `core.products.linear`.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    onednn: bool = False

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits `[..., vocab]` in float32."""
        # z = scale h Wᵀ + b, in place: one matrix `[..., vocab]` only
        product = linear if self.onednn else F.linear
        logits = product(hidden.float(), self.weight.float())
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.bias is not None:
            logits.add_(self.bias.float())
        return logits


class Distributions(NamedTuple):
    """Next-token distributions of some actions.

    Args:
        states: hidden states `[n_tokens, d]`, or logits `[n_tokens, vocab]` if there is no head.
        head: language-model head of the hidden states; None for logits.
    """

    states: Tensor
    head: Head | None

    def log_probs(self, rows: slice) -> Tensor:
        """Compute the log-probs `[n, vocab]` of some actions over the vocabulary."""
        logits = self.states[rows]
        if self.head is not None:
            logits = self.head.logits(logits)
        return logits.log_softmax(dim=-1)

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

    Examples:
        >>> log_prob, entropy = scores_of_logits(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        >>> round(float(log_prob), 3), round(float(entropy), 3)
        (-0.693, 0.693)
    """
    log_probs = logits.float().log_softmax(dim=-1)  # log p, [n_tokens, vocab]
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)  # H = -Σ p log p, [n_tokens]
    return log_probs.gather(1, actions[:, None]).squeeze(1), entropy


def masked_scores_of_logits(logits: Tensor, actions: Tensor, allowed: Tensor) -> MaskedScores:
    """Compute `scores_of_logits` over the allowed tokens.

    Args:
        logits: `[n_tokens, vocab]`.
        actions: token ids `[n_tokens]`.
        allowed: `[n_tokens, n_bytes]`, see `core.token_masks`.

    Examples:
        >>> allowed = torch.tensor([[0b011]], dtype=torch.uint8)  # tokens 0 and 1
        >>> scores = masked_scores_of_logits(torch.zeros(1, 3), torch.tensor([1]), allowed)
        >>> [round(float(score), 3) for score in scores]  # log(1/2), its entropy, log(1/3)
        [-0.693, 0.693, -1.099]
    """
    # The KL to the reference is over the whole vocabulary, so the log-prob without the mask is returned as well.
    logits = logits.float()
    raw_log_prob = logits.detach().log_softmax(dim=-1).gather(1, actions[:, None]).squeeze(1)
    return MaskedScores(*scores_of_logits(masked_logits(logits, allowed), actions), raw_log_prob)


def masked_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits `[n_tokens, vocab]` with those of all but the allowed tokens `[n_tokens, n_bytes]` set to `NEVER`.

    Examples:
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
    log_prob, entropy, _ = _scored(hidden, head, actions, allowed=None, logits_budget=logits_budget)
    return log_prob, entropy


@torch.no_grad()
def token_log_probs(hidden: Tensor, head: Head, actions: Tensor, *, logits_budget: int) -> Tensor:
    """Compute the log-probs `[n_tokens]` of `token_scores` alone, with the same bytes and without gradients.

    Without entropies there is no matrix of probabilities. Arguments are those of `token_scores`.
    """
    log_prob = hidden.new_empty(len(actions), dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _chunks(len(actions), _chunk_size(head, logits_budget)):
            log_prob[rows] = _log_prob(head.logits(hidden[rows]), actions[rows])
    return log_prob


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
    return MaskedScores(*_scored(hidden, head, actions, allowed=allowed, logits_budget=logits_budget))


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

    Examples:
        >>> p = Distributions(torch.tensor([[0.5, 0.3, 0.2]]).log(), None)
        >>> q = Distributions(torch.tensor([[0.2, 0.3, 0.5]]).log(), None)
        >>> [round(float(vocabulary_kl(p, q, top_k=k, logits_budget=100)), 4) for k in (None, 2, 1)]
        [0.2749, 0.2749, 0.2231]
    """
    chunks = _chunks(len(policy.states), max(logits_budget // (_KL_TENSORS * policy.vocab_size), 1))
    with torch.autocast(policy.states.device.type, enabled=False):
        if len(chunks) == 1:
            return _chunk_kl(policy, reference, chunks[0], top_k)

        # The graph of a chunk is dropped after its forward pass, and built again in its backward pass.
        kls = []
        for rows in chunks:
            kls.append(checkpoint(_chunk_kl, policy, reference, rows, top_k, use_reentrant=False))
    return torch.cat(kls)


_KL_TENSORS = 4
"""Tensors of the size of the logits that `_chunk_kl` has in memory at the same time."""


def _chunk_kl(policy: Distributions, reference: Distributions, rows: slice, top_k: int | None) -> Tensor:
    """Return the KL of the actions in one chunk `[n]`."""
    log_p = policy.log_probs(rows)  # [n, vocab]
    with torch.no_grad():
        # Further tokens of the reference have p = 0, and contribute nothing to the sum.
        log_q = reference.log_probs(rows)[:, : log_p.shape[1]].to(log_p.device)

    # The k tokens are the policy's most probable ones; the choice itself has no gradient.
    if top_k is not None and top_k < log_p.shape[1]:
        top = log_p.detach().topk(top_k).indices  # [n, k]
        log_p = _with_remainder(log_p, top)
        log_q = _with_remainder(log_q, top)

    # KL(p ‖ q) = Σ p (log p - log q)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _with_remainder(log_probs: Tensor, top: Tensor) -> Tensor:
    """Return the log-probs of the tokens `top` `[n, k]`, and that of all others together `[n, k + 1]`."""
    remainder = log_probs.scatter(1, top, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([log_probs.gather(1, top), remainder], dim=1)


def _scored(
    hidden: Tensor, head: Head, actions: Tensor, *, allowed: Tensor | None, logits_budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob, entropy and raw log-prob `[n_tokens]`, in chunks of as many tokens as the budget allows."""
    chunk_size = _chunk_size(head, logits_budget)
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenScores.apply(
            hidden.float(), head.weight, head.bias, head.scale, head.onednn, actions, chunk_size, allowed
        )


class _TokenScores(torch.autograd.Function):
    """Autograd function of `token_scores` and `masked_token_scores`; without masks the raw log-prob is empty."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        onednn: bool,
        actions: Tensor,
        chunk_size: int,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(weight, bias, scale, onednn)
        n_tokens = len(actions)
        log_prob = hidden.new_empty(n_tokens, dtype=torch.float32)
        entropy = hidden.new_empty(n_tokens, dtype=torch.float32)
        raw_log_prob = hidden.new_empty(0 if allowed is None else n_tokens, dtype=torch.float32)

        # p `[n_tokens, vocab]` is stored for the backward pass only if all tokens fit into one chunk, that is, into the
        # budget. Not by `save_for_backward`: the backward pass overwrites it.
        chunks = _chunks(n_tokens, chunk_size)
        stores_probs = len(chunks) == 1 and any(ctx.needs_input_grad[:3])
        ctx.probs = None
        for rows in chunks:
            logits = head.logits(hidden[rows])
            if allowed is not None:
                raw_log_prob[rows] = _log_prob(logits, actions[rows])  # before `_softmax` overwrites the logits
            probs, log_prob[rows], entropy[rows] = _softmax(logits, actions[rows], _rows_of(allowed, rows))
            if stores_probs:
                ctx.probs = probs
            # Before those of the next chunk are made, so that there are never more than two of this size.
            del logits, probs

        ctx.save_for_backward(hidden, weight, bias, actions, entropy, allowed)
        ctx.scale = scale
        ctx.onednn = onednn
        ctx.chunk_size = chunk_size
        ctx.stores_probs = stores_probs

        # An output that the loss does not use has the gradient None, not zeros: without an entropy bonus, the costly
        # part of the formula is then left out.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(raw_log_prob)
        return log_prob, entropy, raw_log_prob

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy, _ = gradients  # g and h of the module docstring, [n_tokens]
        hidden, weight, bias, actions, entropy, allowed = ctx.saved_tensors
        if ctx.stores_probs and ctx.probs is None:
            raise RuntimeError("token_scores: the graph was freed by its first backward pass")

        head = Head(weight, bias, ctx.scale, ctx.onednn)

        # dL/dh [n_tokens, d]; dL/dW [vocab, d] and dL/db [vocab] are sums over the chunks. With one chunk, dL/dW is its
        # product itself: a matrix of zeros to add it to would take as much memory as the head.
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        chunks = _chunks(len(actions), ctx.chunk_size)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if needs_weight and len(chunks) != 1 else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None

        for rows in chunks:
            # p, stored by the forward pass or recomputed with the same operations.
            probs = ctx.probs
            if probs is None:
                probs, _, _ = _softmax(head.logits(hidden[rows]), actions[rows], _rows_of(allowed, rows))
            ctx.probs = None  # `_logit_gradient` overwrites them

            # dL/dz, then with z = scale h Wᵀ + b: dL/db = Σ dL/dz, dL/dh = scale dL/dz W, dL/dW = scale (dL/dz)ᵀ h
            grad = _logit_gradient(
                probs=probs,
                actions=actions[rows],
                grad_log_prob=_rows_of(grad_log_prob, rows),
                grad_entropy=_rows_of(grad_entropy, rows),
                entropy=entropy[rows],
            )
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            if ctx.scale != 1.0:
                grad.mul_(ctx.scale)
            torch.mm(grad, weight, out=grad_hidden[rows])

            if needs_weight:
                product = grad.T @ hidden[rows]
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            del probs, grad  # one tensor, as in the forward pass
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _chunk_size(head: Head, logits_budget: int) -> int:
    """Return the number of tokens whose logits fit into the budget, at least one."""
    return max(logits_budget // head.weight.shape[0], 1)


def _chunks(n_tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, n_tokens)) for start in range(0, n_tokens, chunk_size)]


def _rows_of(field: Tensor | None, rows: slice) -> Tensor | None:
    return None if field is None else field[rows]


def _log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Compute log-prob `[n]` with the operations of `_softmax`, so that both agree bit by bit if all is allowed."""
    shifted = logits - logits.amax(dim=1, keepdim=True)
    chosen_logit = shifted.gather(1, actions[:, None]).squeeze(1)

    # In place: a second matrix of this size would be in memory next to the one that `_softmax` needs.
    return chosen_logit - shifted.exp_().sum(dim=1, keepdim=True).squeeze(1).log()


def _softmax(logits: Tensor, actions: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute probabilities `[n, vocab]`, log-prob and entropy `[n]`, one exponential per logit; overwrite logits."""
    if allowed is not None:
        logits.masked_fill_(~unpack(allowed, logits.shape[1]), NEVER)

    # p = exp(z - max z) / Z. The largest exponential is 1, so that none overflows and Z is at least 1.
    logits -= logits.amax(dim=1, keepdim=True)
    probs = logits.exp()
    norm = probs.sum(dim=1, keepdim=True)  # Z, [n, 1]
    log_norm = norm.squeeze(1).log()
    probs /= norm

    # log p_y = z_y - log Z, and H = -Σ p (z - log Z) = log Z - Σ p z: without a matrix of log-probs.
    mean_logit = torch.bmm(probs[:, None, :], logits[:, :, None]).view(-1)
    log_prob = logits.gather(1, actions[:, None]).squeeze(1) - log_norm
    return probs, log_prob, log_norm - mean_logit


def _logit_gradient(
    probs: Tensor, actions: Tensor, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Compute the gradient formula of the module docstring, in place in `probs`."""
    # (1[y] - p) g - p (log p + H) h, here as 1[y] g - p (g + (log p + H) h)
    g = torch.zeros_like(entropy) if grad_log_prob is None else grad_log_prob

    # With h = 0 the costly part of the formula is left out: the loss of Stable-Baselines3 has an entropy also with the
    # coefficient 0. Not on a GPU, which finishes the whole backward pass so far before it answers.
    has_entropy = grad_entropy is not None
    if grad_entropy is not None and grad_entropy.device.type == "cpu":
        has_entropy = bool(grad_entropy.any())

    if grad_entropy is None or not has_entropy:
        grad = probs.mul_(-g[:, None])
    else:
        # log of the smallest normal number in place of log 0, which p = 0 then cancels: 0 times -inf would be NaN.
        log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log_()
        factor = log_probs.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(g[:, None])
        grad = probs.mul_(factor).neg_()

    # 1[y] g is 0 but for the action of each row
    grad[torch.arange(len(actions), device=actions.device), actions] += g
    return grad
