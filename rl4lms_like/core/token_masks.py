"""Which tokens may be chosen: one bit for each entry of the vocabulary.

    allowed  [n, vocab]              bool, alive for one step or one chunk at a time
    packed   [n, ceil(vocab / 8)]    uint8, what is kept of every token of a rollout

Bit `i % 8` of byte `i // 8` says whether token `i` is allowed. 50257 tokens are 6283 bytes; as floats they would be 201
kB. The functions that choose tokens have one meaning for every model family.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

N_BEST = 2048
"""So many best tokens are looked at before a whole vocabulary is sorted: seven times as fast where they suffice."""


def top_p_mask(logits: Tensor, p: float, min_tokens_to_keep: int = 1) -> Tensor:
    """The fewest tokens that have probability `p` together (arXiv 1904.09751), the one that crosses it included.

    Args:
        logits: `[..., vocab]`.
        p: in (0, 1]; 1 allows every token.
        min_tokens_to_keep: at least so many, the most probable ones.

    Returns:
        `[..., vocab]`, bool.
    """
    if p >= 1.0:  # a cumulative sum may exceed 1 by rounding
        return torch.ones_like(logits, dtype=torch.bool)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    probs = exact.softmax(dim=-1)
    n_best = max(N_BEST, min_tokens_to_keep)
    if n_best < probs.shape[-1]:
        best = probs.topk(n_best, dim=-1)
        if bool((best.values.sum(dim=-1) > p).all()):
            return _crossing(best.values, best.indices, p, min_tokens_to_keep, like=probs)
    values, indices = probs.sort(dim=-1, descending=True, stable=True)
    return _crossing(values, indices, p, min_tokens_to_keep, like=probs)


def _crossing(probs: Tensor, token_ids: Tensor, p: float, min_tokens_to_keep: int, *, like: Tensor) -> Tensor:
    """Of the best tokens, in descending order, those up to the one that crosses `p`, as a mask like `like`."""
    mass_before = probs.cumsum(dim=-1).roll(1, dims=-1)
    mass_before[..., 0] = 0.0
    kept = mass_before <= p
    kept[..., :min_tokens_to_keep] = True
    return torch.zeros_like(like, dtype=torch.bool).scatter_(-1, token_ids, kept)


def top_k_mask(logits: Tensor, k: int) -> Tensor:
    """The `k` most probable tokens; all of them where the vocabulary has fewer. `[..., vocab]`, bool."""
    best = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)


def with_tokens(allowed: Tensor, token_ids: Sequence[int]) -> Tensor:
    """The mask `[..., vocab]` with some tokens allowed whatever it says, in place."""
    allowed[..., list(token_ids)] = True
    return allowed


def packed_size(vocab_size: int) -> int:
    """Bytes of one token's mask."""
    return (vocab_size + 7) // 8


def pack(allowed: Tensor) -> Tensor:
    """A mask `[..., vocab]` as bits `[..., n_bytes]`; those beyond the vocabulary are 0."""
    missing = -allowed.shape[-1] % 8
    bits = torch.nn.functional.pad(allowed.to(torch.uint8), (0, missing)).unflatten(-1, (-1, 8))
    return (bits << _places(allowed.device)).sum(dim=-1, dtype=torch.uint8)


def unpack(packed: Tensor, vocab_size: int) -> Tensor:
    """The mask `[..., vocab]` of some bits `[..., n_bytes]`."""
    bits = (packed[..., None] >> _places(packed.device)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def contains(packed: Tensor, token_ids: Tensor) -> Tensor:
    """Whether each of `n` masks `[n, n_bytes]` allows its token `[n]`; bool."""
    byte = packed.gather(1, (token_ids // 8)[:, None]).squeeze(1)
    return ((byte >> (token_ids % 8).to(torch.uint8)) & 1).bool()


def n_allowed(packed: Tensor) -> Tensor:
    """How many tokens each of `n` masks `[n, n_bytes]` allows `[n]`."""
    # Sums of 1, of 2 and of 4 neighbouring bits, all within their byte.
    pairs = packed - ((packed >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return ((fours + (fours >> 4)) & 0x0F).sum(dim=-1, dtype=torch.int64)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
