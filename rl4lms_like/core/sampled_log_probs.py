"""Limits of sampled tokens and of their log-probs that come from outside: from a server, or from a file."""

from __future__ import annotations

from torch import Tensor

HIGHEST = 1e-3
"""Highest log-prob in nats that is accepted; above 0 it can only be a rounding error."""
LOWEST = -1e4
"""Lowest log-prob in nats that is accepted: no softmax over finite logits samples a token that is less probable."""
UNSURE = -1.0
"""Log-prob below which a policy is not sure of a token, so that the one of an engine with its weights is not 0."""


def impossible_ids(ids: Tensor, vocab_size: int) -> str | None:
    """Return which ids of tokens, of any shape, the policy does not have, or None if it has all.

    On a GPU such an id would end the process, without a message.

    Examples:
        >>> import torch
        >>> impossible_ids(torch.tensor([[5, 50], [7, -1]]), vocab_size=50)
        'ids of tokens from -1 to 50; the policy has 50 tokens'
    """
    if not ids.numel() or 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return None
    return f"ids of tokens from {int(ids.min())} to {int(ids.max())}; the policy has {vocab_size} tokens"


def impossible_log_probs(log_prob: Tensor) -> str | None:
    """Return which of the log-probs of sampled tokens `[n_tokens]` cannot be, or None if all can.

    Examples:
        >>> import torch
        >>> impossible_log_probs(torch.tensor([-1.0, 3.0]))
        '1 of 2 log-probs of sampled tokens cannot be: that of token 1 is 3 (expected -10000 to 0.001)'
    """
    # Written so that NaN, for which every comparison is False, is impossible too.
    is_possible = (log_prob >= LOWEST) & (log_prob <= HIGHEST)
    impossible = (~is_possible).nonzero().reshape(-1)
    if not len(impossible):
        return None

    first = int(impossible[0])
    count = f"{len(impossible)} of {len(log_prob)} log-probs of sampled tokens cannot be"
    return f"{count}: that of token {first} is {float(log_prob[first]):g} (expected {LOWEST:g} to {HIGHEST:g})"
