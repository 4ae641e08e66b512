"""Whole episodes as tensors. Padded matrices are for models; flat vectors are for losses.

prompt_ids    [n, prompt_len]    padded on `prompt_side`
response_ids  [n, response_len]  right-padded
flat field    [n_tokens]         the actions of episode 0, then those of episode 1, ...
allowed       [n_tokens, bytes]  flat too: the tokens each action was chosen from, where they were not all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class EpisodeBatch:
    """`n` finished episodes.

    Args:
        prompt_ids: `[n, prompt_len]`, int64.
        prompt_mask: `[n, prompt_len]`, bool, True = real token.
        response_ids: `[n, response_len]`, int64; what stands where `response_mask` is False is never looked at.
        response_mask: `[n, response_len]`, bool, True = an action of the policy; a run from the left of each row.
        terminated: `[n]`, bool; True = ended by an end-of-text token, False = cut by the length limit.
        prompt_side: the side that prompts are padded on, `left` for causal and `right` for seq2seq models.
        allowed: `[n_tokens, ceil(vocab / 8)]`, uint8, the tokens that each action could be (`core.token_masks`); None
            = every token of the vocabulary.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    terminated: Tensor
    prompt_side: Literal["left", "right"] = "left"
    allowed: Tensor | None = None

    @property
    def n_episodes(self) -> int:
        """The number of episodes."""
        return self.response_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response `[n]`."""
        return self.response_mask.sum(dim=1)

    @property
    def n_tokens(self) -> int:
        """Actions in all episodes together."""
        return int(self.response_mask.sum())

    @property
    def actions(self) -> Tensor:
        """The token ids taken, flat `[n_tokens]`."""
        return self.response_ids[self.response_mask]

    def pad(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """A flat field `[n_tokens]` as a matrix `[n, response_len]`."""
        padded = flat.new_full(self.response_mask.shape, fill)
        padded[self.response_mask] = flat
        return padded

    def per_action(self, values: Tensor) -> Tensor:
        """One number for each episode `[n]`, repeated for its actions `[n_tokens]`."""
        return values.repeat_interleave(self.lengths)

    def token_index(self, episodes: Tensor) -> Tensor:
        """Where the tokens of some episodes lie in a flat field, in the order of `episodes` `[k]`."""
        lengths = self.lengths
        starts = lengths.cumsum(0) - lengths
        chosen = lengths[episodes]
        first = (starts[episodes] - (chosen.cumsum(0) - chosen)).repeat_interleave(chosen)
        return first + torch.arange(int(chosen.sum()), device=first.device)

    def select(self, episodes: Tensor) -> EpisodeBatch:
        """Some of the episodes, in the order of the index `[k]`, without columns that none of them uses."""
        rows = {name: getattr(self, name)[episodes] for name in _ROWS}
        allowed = None if self.allowed is None else self.allowed[self.token_index(episodes)]
        return replace(self, **rows, allowed=allowed).trimmed()

    def trimmed(self) -> EpisodeBatch:
        """The same episodes without columns that hold padding only."""
        prompt_len = max(int(self.prompt_mask.sum(dim=1).max()), 1)
        response_len = max(int(self.lengths.max()), 1)
        columns = slice(-prompt_len, None) if self.prompt_side == "left" else slice(prompt_len)
        return replace(
            self,
            prompt_ids=self.prompt_ids[:, columns],
            prompt_mask=self.prompt_mask[:, columns],
            response_ids=self.response_ids[:, :response_len],
            response_mask=self.response_mask[:, :response_len],
        )

    def widened(self, prompt_len: int, response_len: int) -> EpisodeBatch:
        """The same episodes padded to at least these widths."""

        def pad_to(matrix: Tensor, width: int, side: str) -> Tensor:
            missing = max(width - matrix.shape[1], 0)
            return torch.nn.functional.pad(matrix, (missing, 0) if side == "left" else (0, missing))

        return replace(
            self,
            prompt_ids=pad_to(self.prompt_ids, prompt_len, self.prompt_side),
            prompt_mask=pad_to(self.prompt_mask, prompt_len, self.prompt_side),
            response_ids=pad_to(self.response_ids, response_len, "right"),
            response_mask=pad_to(self.response_mask, response_len, "right"),
        )

    def to(self, device: torch.device | str) -> EpisodeBatch:
        """The same episodes on another device."""
        allowed = None if self.allowed is None else self.allowed.to(device)
        return replace(self, **{name: getattr(self, name).to(device) for name in _ROWS}, allowed=allowed)

    @staticmethod
    def concatenated(batches: Sequence[EpisodeBatch]) -> EpisodeBatch:
        """Several batches as one, padded to the widest.

        Raises:
            ValueError: some have masks and some have not.
        """
        if len(batches) == 1:
            return batches[0]
        prompt_len = max(batch.prompt_ids.shape[1] for batch in batches)
        response_len = max(batch.response_ids.shape[1] for batch in batches)
        wide = [batch.widened(prompt_len, response_len) for batch in batches]
        joined: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in wide]) for name in _ROWS}
        masks = [batch.allowed for batch in wide if batch.allowed is not None]
        if masks and len(masks) < len(wide):
            raise ValueError(f"{len(masks)} of {len(wide)} batches of episodes have masks of allowed tokens")
        return replace(wide[0], **joined, allowed=torch.cat(masks) if masks else None)


_ROWS = tuple(field.name for field in fields(EpisodeBatch) if field.name not in ("prompt_side", "allowed"))
"""Fields with one row for each episode."""


def response_mask_until_end(response_ids: Tensor, eos_token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which generated tokens are actions: everything up to and including the first end-of-text token.

    The pad token cannot tell: it may be the end-of-text token, and it may be sampled.

    Args:
        response_ids: `[n, response_len]` as generated, padded behind the ends.
        eos_token_ids: the tokens that end an episode; none = every episode has full length.

    Returns:
        `response_mask` `[n, response_len]` and `terminated` `[n]`, bool.
    """
    ends = torch.isin(response_ids, torch.tensor(list(eos_token_ids), device=response_ids.device, dtype=torch.int64))
    ended_before = ends.cumsum(dim=1) - ends.long() > 0
    return ~ended_before, ends.any(dim=1)


def pack_episodes(lengths: Sequence[int], order: Sequence[int], batch_size: int) -> list[list[int]]:
    """Groups whole episodes into minibatches of about `batch_size` tokens.

    Goes through `order` and closes a minibatch before it would exceed `batch_size`; an episode longer than that is a
    minibatch of its own.

    Args:
        lengths: tokens of each episode.
        order: episode indices, in the order in which they are packed.
        batch_size: tokens.

    Returns:
        A partition of `order`.
    """
    groups: list[list[int]] = []
    filled = 0
    for episode in order:
        length = lengths[episode]
        if not groups or filled + length > batch_size:
            groups.append([])
            filled = 0
        groups[-1].append(episode)
        filled += length
    return groups
