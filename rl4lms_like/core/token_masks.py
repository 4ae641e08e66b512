"""Masks of the tokens that may be sampled, with one bit per vocabulary entry.

    allowed  [n, vocab]              bool, exists for one step or one chunk at a time
    packed   [n, ceil(vocab / 8)]    uint8, stored for every token of a rollout

Bit `i % 8` of byte `i // 8` is 1 if token `i` is allowed. A mask over 50257 tokens takes 6283 bytes; as floats it would
take 201 kB. The functions behave the same for every model family.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

N_BEST = 2048
"""Number of most probable tokens tried before sorting the whole vocabulary; seven times as fast if they suffice."""


def top_p_mask(logits: Tensor, p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """Mask the smallest set of most probable tokens whose total probability exceeds `p` (arXiv 1904.09751).

    Args:
        logits: `[..., vocab]`.
        p: in (0, 1]; 1 allows every token.
        min_tokens_to_keep: always allow at least this many of the most probable tokens.

    Returns:
        `[..., vocab]`, bool; includes the token with which the total probability crosses `p`.

    Examples:
        >>> top_p_mask(torch.tensor([0.5, 0.3, 0.2]).log(), p=0.6).tolist()
        [True, True, False]
    """
    # A cumulative sum may reach 1 by rounding before the last token.
    if p >= 1.0:
        return torch.ones_like(logits, dtype=torch.bool)

    # At least float32: in bfloat16 a sum of many small probabilities would stop growing.
    if logits.dtype != torch.float64:
        logits = logits.float()
    probs = logits.softmax(dim=-1)

    # Usually the set is small. The most probable tokens are enough if those of every row have more than p together. Not
    # on a GPU, which would have to finish its work before it answers, at every token: there, sorting costs less.
    n_best = max(N_BEST, min_tokens_to_keep)
    if n_best < probs.shape[-1] and probs.device.type == "cpu":
        best = probs.topk(n_best, dim=-1)
        if bool((best.values.sum(dim=-1) > p).all()):
            return _crossing(best.values, best.indices, p, min_tokens_to_keep, like=probs)

    values, indices = probs.sort(dim=-1, descending=True, stable=True)
    return _crossing(values, indices, p, min_tokens_to_keep, like=probs)


def _crossing(probs: Tensor, token_ids: Tensor, p: float, min_tokens_to_keep: int, *, like: Tensor) -> Tensor:
    """Return a mask shaped like `like` of the tokens, given in descending order, up to the one that crosses `p`."""
    # Compared is the probability of all tokens before each one, so that the one that crosses p is in the set.
    mass_before = probs.cumsum(dim=-1).roll(1, dims=-1)
    mass_before[..., 0] = 0.0
    is_allowed = mass_before <= p
    is_allowed[..., :min_tokens_to_keep] = True

    # From the order of probabilities back to that of token ids; a token that is not in the list is not allowed.
    return torch.zeros_like(like, dtype=torch.bool).scatter_(-1, token_ids, is_allowed)


def top_k_mask(logits: Tensor, k: int) -> Tensor:
    """Mask the `k` most probable tokens `[..., vocab]`, bool; all tokens where the vocabulary is smaller than `k`.

    Examples:
        >>> top_k_mask(torch.tensor([0.1, 0.7, 0.2]), k=2).tolist()
        [False, True, True]
    """
    best = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)


def with_tokens(allowed: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Allow some tokens in a mask `[..., vocab]`, in place, and return it."""
    allowed[..., list(token_ids)] = True
    return allowed


def packed_size(vocab_size: int) -> int:
    """Return the number of bytes of one packed mask.

    Examples:
        >>> packed_size(50257)
        6283
    """
    return (vocab_size + 7) // 8


def pack(allowed: Tensor) -> Tensor:
    """Pack a mask `[..., vocab]` into bits `[..., n_bytes]`; bits beyond the vocabulary are 0.

    Examples:
        >>> pack(torch.tensor([True, False, True])).tolist()  # bits 0 and 2
        [5]
    """
    n_missing = -allowed.shape[-1] % 8
    bits = torch.nn.functional.pad(allowed.to(torch.uint8), (0, n_missing)).unflatten(-1, (-1, 8))  # [..., n_bytes, 8]

    # byte = Σ bit_i 2^i; the bits do not overlap, so the sum is an `or`.
    return (bits << _bit_numbers(allowed.device)).sum(dim=-1, dtype=torch.uint8)


def unpack(packed: Tensor, vocab_size: int) -> Tensor:
    """Unpack bits `[..., n_bytes]` into a mask `[..., vocab]`.

    Examples:
        >>> unpack(torch.tensor([5], dtype=torch.uint8), vocab_size=3).tolist()
        [True, False, True]
    """
    bits = (packed[..., None] >> _bit_numbers(packed.device)) & 1  # [..., n_bytes, 8]
    return bits.flatten(-2)[..., :vocab_size].bool()


def contains(packed: Tensor, token_ids: Tensor) -> Tensor:
    """Return whether each of `n` packed masks `[n, n_bytes]` allows its token `[n]`; bool.

    Examples:
        >>> contains(pack(torch.tensor([[True, False, True], [True, False, True]])), torch.tensor([1, 2])).tolist()
        [False, True]
    """
    byte = packed.gather(1, (token_ids // 8)[:, None]).squeeze(1)  # [n]
    return ((byte >> (token_ids % 8).to(torch.uint8)) & 1).bool()


def n_allowed(packed: Tensor) -> Tensor:
    """Count the allowed tokens `[n]` of `n` packed masks `[n, n_bytes]`.

    Examples:
        >>> n_allowed(pack(torch.tensor([[True, False, True], [False, False, True]]))).tolist()
        [2, 1]
    """
    # Parallel bit count: sum neighbouring bits, then pairs, then fours, all within their byte.
    pairs = packed - ((packed >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return ((fours + (fours >> 4)) & 0x0F).sum(dim=-1, dtype=torch.int64)


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
