"""Whole episodes as tensors. Padded matrices are for models; flat vectors are for losses.

prompt_ids    [n, prompt_len]    padded on `prompt_side`
response_ids  [n, response_len]  right-padded; tokens where `observed` come from the environment, not the policy
flat field    [n_tokens]         the actions of episode 0, then those of episode 1, ...
allowed       [n_tokens, bytes]  flat too: the tokens each action was chosen from, unless it was the whole vocabulary

Sizes and positions are computed in main memory (`EpisodeLayout`). To read them from a GPU, the process would have to
wait until the GPU has finished all work that is queued; a mask as an index (`matrix[mask]`) waits, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rl4lms_like.core.devices import to_device

if TYPE_CHECKING:
    from rl4lms_like.system.ranks import Ranks


@dataclass(frozen=True, eq=False)
class EpisodeLayout:
    """Lengths and masks of `n` episodes in main memory, whatever the device of the episodes.

    Args:
        prompt_lengths: `[n]`, number of tokens of each prompt.
        response_lengths: `[n]`, number of tokens of each response.
        action_mask: `[n, response_len]`, see `EpisodeBatch.action_mask`.
        group_ids: `[n]`, see `EpisodeBatch`; or None.
        prompt_rows: `[n]`, see `EpisodeBatch`; or None.
        pictures: `[n]`, see `EpisodeBatch`; or None.
    """

    prompt_lengths: Tensor
    response_lengths: Tensor
    action_mask: Tensor
    group_ids: Tensor | None
    prompt_rows: Tensor | None
    pictures: Tensor | None

    @cached_property
    def lengths(self) -> Tensor:
        """Number of actions of each episode `[n]`."""
        return self.action_mask.sum(dim=1)

    @cached_property
    def n_actions(self) -> int:
        """Total number of actions."""
        return int(self.lengths.sum())

    @property
    def prompt_width(self) -> int:
        """Number of columns that the prompts need; at least one, also if all prompts are empty."""
        return max(int(self.prompt_lengths.max()), 1)

    @property
    def response_width(self) -> int:
        """Number of columns that the responses need, at least one."""
        return max(int(self.response_lengths.max()), 1)

    def select(self, index: Tensor) -> EpisodeLayout:
        """Return the layout of some of the episodes, in the order of the index `[k]`."""
        return EpisodeLayout(
            self.prompt_lengths[index],
            self.response_lengths[index],
            self.action_mask[index],
            None if self.group_ids is None else self.group_ids[index],
            None if self.prompt_rows is None else self.prompt_rows[index],
            None if self.pictures is None else self.pictures[index],
        )

    def trimmed(self) -> EpisodeLayout:
        """Return the layout of the same episodes without columns that contain only padding."""
        return replace(self, action_mask=self.action_mask[:, : self.response_width])

    def token_index(self, episodes: Tensor) -> Tensor:
        """Return the positions in a flat field of the tokens of some episodes, in the order of `episodes` `[k]`."""
        starts = self.lengths.cumsum(0) - self.lengths  # position of each episode's first token here, [n]
        new_lengths = self.lengths[episodes]
        new_starts = new_lengths.cumsum(0) - new_lengths  # ... and in the result, [k]

        # All tokens of an episode move by the same distance: old position = new position + (old start - new start).
        offsets = (starts[episodes] - new_starts).repeat_interleave(new_lengths)
        return offsets + torch.arange(len(offsets))


@dataclass(frozen=True)
class EpisodeBatch:
    """Batch of `n` finished episodes.

    Args:
        prompt_ids: `[n, prompt_len]`, int64.
        prompt_mask: `[n, prompt_len]`, bool, True = real token.
        response_ids: `[n, response_len]`, int64; entries where `response_mask` is False are ignored.
        response_mask: `[n, response_len]`, bool, True = real token; the real tokens are contiguous from the left.
        terminated: `[n]`, bool; True = ended by an end-of-text token or a stop string, False = truncated by the
            length limit.
        prompt_side: padding side of the prompts, `left` for causal and `right` for seq2seq models.
        allowed: `[n_tokens, ceil(vocab / 8)]`, uint8, the tokens that each action was chosen from
            (`core.token_masks`); None = every token of the vocabulary.
        observed: `[n, response_len]`, bool, True = a token of the environment (the output of a tool, the next turn).
            The model reads it, but it is not an action. Every episode has an action. None = all tokens are actions.
        group_ids: `[n]`, int64, equal for episodes whose rewards are compared with each other.
        prompt_rows: `[n]`, int64, equal for episodes with the same prompt.
        pictures: `[n]`, int64, numbers of the prompts' pictures (`core.pictures.number_of`), 0 = none. None if the
            policy reads texts only.
        behavior_log_prob: `[n_tokens]`, log-prob of each action under the distribution that it was sampled from
            (including temperature, top-k ...).
        behavior_entropy: `[n_tokens]`, entropy of that distribution; only between the sampling and the scoring of a
            rollout.
        turn_position: `[n_tokens]`, int64, number of actions before each action in its turn. None = a turn ends at the
            next observed token.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    terminated: Tensor
    prompt_side: Literal["left", "right"] = "left"
    allowed: Tensor | None = None
    observed: Tensor | None = None
    group_ids: Tensor | None = None
    prompt_rows: Tensor | None = None
    pictures: Tensor | None = None
    behavior_log_prob: Tensor | None = None
    behavior_entropy: Tensor | None = None
    turn_position: Tensor | None = None

    @property
    def n_episodes(self) -> int:
        """Number of episodes."""
        return self.response_ids.shape[0]

    @property
    def action_mask(self) -> Tensor:
        """Mask `[n, response_len]`, True where a response token is an action of the policy."""
        return self.response_mask if self.observed is None else self.response_mask & ~self.observed

    @property
    def lengths(self) -> Tensor:
        """Number of actions of each episode `[n]`."""
        return self.action_mask.sum(dim=1)

    @property
    def response_lengths(self) -> Tensor:
        """Number of tokens of each response `[n]`: actions and observed tokens."""
        return self.response_mask.sum(dim=1)

    @property
    def n_tokens(self) -> int:
        """Total number of actions."""
        return self.layout.n_actions

    @property
    def actions(self) -> Tensor:
        """Token ids of all actions, flat `[n_tokens]`."""
        return self.flat(self.response_ids)

    @cached_property
    def layout(self) -> EpisodeLayout:
        """Lengths and masks in main memory. Read from the device once: selected episodes have a part of it."""
        return EpisodeLayout(
            self.prompt_mask.sum(dim=1).cpu(),
            self.response_lengths.cpu(),
            self.action_mask.cpu(),
            None if self.group_ids is None else self.group_ids.cpu(),
            None if self.prompt_rows is None else self.prompt_rows.cpu(),
            None if self.pictures is None else self.pictures.cpu(),
        )

    @cached_property
    def _action_index(self) -> tuple[Tensor, ...]:
        """Rows and columns of all actions `[n_tokens]`, episode after episode, as an index of padded matrices."""
        # `matrix[mask]` would find these positions on the device, and wait for their number.
        return to_device(self.layout.action_mask.nonzero().T, self.response_ids.device).unbind()

    def _with_layout(self, layout: EpisodeLayout) -> EpisodeBatch:
        """Set a layout that is known, so that it is not read from the device; `dataclasses.replace` drops it."""
        self.__dict__["layout"] = layout
        return self

    def __getstate__(self) -> dict[str, Any]:
        # The fields alone: tensors that another process restores are all on its device, but a layout must not be.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def n_before_in_turn(self) -> Tensor:
        """Return the number of actions before each action in its turn, flat `[n_tokens]`."""
        # Observed tokens do not show where a turn begins that follows an empty answer.
        if self.turn_position is not None:
            return self.turn_position
        columns = torch.arange(self.response_ids.shape[1], device=self.response_ids.device)
        last_observed = torch.full_like(self.response_ids, -1)  # column of the last observed token so far
        if self.observed is not None:
            last_observed = torch.where(self.observed & self.response_mask, columns, -1).cummax(dim=1).values
        return self.flat(columns - last_observed - 1)

    def shared_prompts(self) -> tuple[Tensor, Tensor] | None:
        """Return one episode of each different prompt `[u]`, and the position of each episode's prompt in it `[n]`.

        None if no two episodes are known to have the same prompt.
        """
        prompt_rows = self.layout.prompt_rows
        if prompt_rows is None:
            return None
        numbers, rows = prompt_rows.unique(return_inverse=True)  # rows: [n], from 0 to u - 1
        if len(numbers) == self.n_episodes:
            return None

        # The first episode of each prompt. A plain scatter would keep any of those with the same index, not always the
        # same.
        episodes = torch.arange(self.n_episodes)
        first = episodes.new_zeros(len(numbers)).scatter_reduce(0, rows, episodes, "amin", include_self=False)  # [u]
        device = self.response_ids.device
        return to_device(first, device), to_device(rows, device)

    def together(self, rows: Tensor | None) -> list[list[int]]:
        """Return the episodes with equal `rows` (prompts or groups), in their order; each alone if they are None."""
        if rows is None:
            return [[episode] for episode in range(self.n_episodes)]

        # In the order of their first episodes, whether or not episodes with the same number are neighbours.
        units: dict[int, list[int]] = {}
        for episode, number in enumerate(rows.tolist()):
            units.setdefault(number, []).append(episode)
        return list(units.values())

    def pad(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Return a flat field `[n_tokens]` as a padded matrix `[n, response_len]`."""
        padded = flat.new_full(self.response_ids.shape, fill)
        padded[self._action_index] = flat
        return padded

    def flat(self, padded: Tensor) -> Tensor:
        """Return the entries of the actions `[n_tokens, ...]` of a padded matrix `[n, response_len, ...]`."""
        return padded[self._action_index]

    def token_index(self, episodes: Tensor | Sequence[int]) -> Tensor:
        """Return the positions in a flat field of the tokens of some episodes, in the order of `episodes` `[k]`."""
        index = torch.as_tensor(episodes, dtype=torch.int64, device="cpu")
        return to_device(self.layout.token_index(index), self.response_ids.device)

    def select(self, episodes: Tensor | Sequence[int]) -> EpisodeBatch:
        """Return some of the episodes, in the order of the index `[k]`, without columns that none of them uses.

        The index is best in main memory. One on a device is copied, for which the process waits.
        """
        index = torch.as_tensor(episodes, dtype=torch.int64, device="cpu")
        rows = to_device(index, self.response_ids.device)
        selected = {name: field[rows] for name, field in self._present(_ROWS).items()}

        # Flat fields have one row per action, so they are selected by the positions of the actions.
        flat = self._present(_FLAT)
        if flat:
            tokens = self.token_index(index)
            selected |= {name: field[tokens] for name, field in flat.items()}
        return replace(self, **selected)._with_layout(self.layout.select(index)).trimmed()

    def without_masks(self) -> EpisodeBatch:
        """Return the same episodes as if every action had been chosen from the whole vocabulary."""
        return self.without("allowed")

    def without(self, *names: str) -> EpisodeBatch:
        """Return the same episodes without some of the optional fields of actions, such as `behavior_entropy`."""
        without: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **without)._with_layout(self.layout)

    def trimmed(self) -> EpisodeBatch:
        """Return the same episodes without columns that contain only padding."""
        prompt_len = self.layout.prompt_width
        response_len = self.layout.response_width
        columns = slice(-prompt_len, None) if self.prompt_side == "left" else slice(prompt_len)
        observed = self.observed
        if observed is not None:
            observed = observed[:, :response_len]
        trimmed = replace(
            self,
            prompt_ids=self.prompt_ids[:, columns],
            prompt_mask=self.prompt_mask[:, columns],
            response_ids=self.response_ids[:, :response_len],
            response_mask=self.response_mask[:, :response_len],
            observed=observed,
        )
        return trimmed._with_layout(self.layout.trimmed())

    def widened(self, prompt_len: int, response_len: int) -> EpisodeBatch:
        """Return the same episodes padded to at least these widths."""

        def pad_to(matrix: Tensor, width: int, side: str) -> Tensor:
            # Zeros: False in masks, and in ids an entry that the mask excludes.
            missing = max(width - matrix.shape[1], 0)
            return torch.nn.functional.pad(matrix, (missing, 0) if side == "left" else (0, missing))

        observed = self.observed
        if observed is not None:
            observed = pad_to(observed, response_len, "right")
        return replace(
            self,
            prompt_ids=pad_to(self.prompt_ids, prompt_len, self.prompt_side),
            prompt_mask=pad_to(self.prompt_mask, prompt_len, self.prompt_side),
            response_ids=pad_to(self.response_ids, response_len, "right"),
            response_mask=pad_to(self.response_mask, response_len, "right"),
            observed=observed,
        )

    def to(self, device: torch.device | str) -> EpisodeBatch:
        """Return the same episodes on another device."""
        device = torch.device(device)
        if self.response_ids.device == device:
            return self
        moved: dict[str, Any] = {name: to_device(field, device) for name, field in self._present(_ROWS + _FLAT).items()}
        return replace(self, **moved)._with_layout(self.layout)

    def _present(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the fields of these names that are not None."""
        return {name: field for name in names if (field := getattr(self, name)) is not None}

    @staticmethod
    def concatenated(batches: Sequence[EpisodeBatch]) -> EpisodeBatch:
        """Return several batches as one, padded to the widest.

        Group ids and prompt rows are renumbered, so that those of different batches stay distinct. If only some
        batches have `observed`, all response tokens of the others count as actions.

        Raises:
            ValueError: only some of the batches have masks, groups, prompt rows or log-probs.
        """
        if len(batches) == 1:
            return batches[0]

        # All of one width. Without observed tokens all are actions: a mask of False says the same.
        prompt_len = max(batch.prompt_ids.shape[1] for batch in batches)
        response_len = max(batch.response_ids.shape[1] for batch in batches)
        has_observed = any(batch.observed is not None for batch in batches)
        wide = []
        for batch in batches:
            batch = batch.widened(prompt_len, response_len)
            if has_observed and batch.observed is None:
                batch = replace(batch, observed=torch.zeros_like(batch.response_mask))
            wide.append(batch)

        joined: dict[str, Tensor | None] = {}
        for name in _ROWS + _FLAT:
            joined[name] = _concatenated_field(name, [getattr(batch, name) for batch in wide])
        return replace(wide[0], **joined)  # type: ignore[arg-type]


def padded(
    rows: Sequence[Sequence[int]], fill: int = 0, side: Literal["left", "right"] = "right"
) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on one side to the length of the longest.

    Args:
        rows: `n` rows of ids.
        fill: the id of the padding.
        side: the side that is padded.

    Returns:
        The ids `[n, longest]`, int64, and their mask `[n, longest]`, bool, True = not padding.

    Examples:
        >>> ids, mask = padded([[5, 6], [7]], fill=0, side="left")
        >>> ids.tolist(), mask.tolist()
        ([[5, 6], [0, 7]], [[True, True], [False, True]])
    """
    lengths = torch.tensor([len(row) for row in rows])[:, None]  # [n, 1]
    columns = torch.arange(int(lengths.max()))
    mask = columns < lengths if side == "right" else columns >= len(columns) - lengths  # [n, longest]

    # The ids of all rows in one assignment: a mask selects row by row, from left to right.
    ids = torch.full(mask.shape, fill)
    ids[mask] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return ids, mask


def real_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the real tokens of each row of padded ids `[n, length]`."""
    return [row[keep].tolist() for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]


_FLAT = ("allowed", "behavior_log_prob", "behavior_entropy", "turn_position")
"""Fields with one row per action."""
_NUMBERS = ("group_ids", "prompt_rows")
"""Fields whose numbers are only meaningful within their batch."""
_ROWS = tuple(field.name for field in fields(EpisodeBatch) if field.name not in ("prompt_side", *_FLAT))
"""Fields with one row per episode."""


def _concatenated_field(name: str, fields: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate a field of several batches; None if none of them has it.

    Raises:
        ValueError: only some of the batches have it.
    """
    present = [field for field in fields if field is not None]
    if not present:
        return None
    if len(present) < len(fields):
        raise ValueError(f"{len(present)} of {len(fields)} batches of episodes have {name}")
    if name not in _NUMBERS:
        return torch.cat(present)

    # Numbers are shifted above those of the previous batches: 0 0 1 and 4 5 5 become 0 0 1 2 3 3.
    shifted = [present[0]]
    for numbers in present[1:]:
        shifted.append(numbers - numbers.min() + shifted[-1].max() + 1)
    return torch.cat(shifted)


def response_mask_until_end(response_ids: Tensor, eos_token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute the mask of generated tokens up to and including the first end-of-text token.

    The pad token is not used for this, since it may be the end-of-text token, and it may be sampled.

    Args:
        response_ids: `[n, response_len]` as generated, padded after the end of each response.
        eos_token_ids: the tokens that end an episode; none = every episode has full length.

    Returns:
        `response_mask` `[n, response_len]` and `terminated` `[n]`, bool.

    Examples:
        >>> mask, terminated = response_mask_until_end(torch.tensor([[5, 2, 2], [5, 6, 7]]), eos_token_ids=[2])
        >>> mask.tolist(), terminated.tolist()
        ([[True, True, False], [True, True, True]], [True, False])
    """
    eos_ids = torch.tensor(list(eos_token_ids), device=response_ids.device, dtype=torch.int64)
    is_end = torch.isin(response_ids, eos_ids)  # [n, response_len]

    # The number of ends before each token, itself not counted: the first end is a part of the response, an action.
    has_ended = is_end.cumsum(dim=1) - is_end.long() > 0
    return ~has_ended, is_end.any(dim=1)


def pack_episodes(
    lengths: Sequence[int],
    order: Sequence[int],
    batch_size: int,
    prompt_rows: Tensor | None = None,
    *,
    keeps_groups: bool = False,
) -> list[list[int]]:
    """Group whole episodes into minibatches of about `batch_size` tokens.

    Episodes are added in the given order. A new minibatch is started where the current one would exceed `batch_size`;
    an episode longer than that is a minibatch of its own. Neighbours with the same prompt are added together, so that
    their prompt is computed once, unless they exceed `batch_size`.

    Args:
        lengths: number of tokens of each episode.
        order: episode indices, in the order in which they are packed.
        batch_size: number of tokens.
        prompt_rows: `[n]`, equal for episodes with the same prompt; None = all prompts are different.
        keeps_groups: add neighbours with the same prompt together even if they exceed `batch_size`.

    Returns:
        A partition of `order`.

    Examples:
        >>> pack_episodes([3, 2, 4, 9], order=[0, 1, 2, 3], batch_size=6)
        [[0, 1], [2], [3]]
        >>> pack_episodes([3, 2, 4, 9], order=[0, 1, 2, 3], batch_size=6, prompt_rows=torch.tensor([0, 1, 1, 2]))
        [[0], [1, 2], [3]]
    """
    # Equal for neighbours that are packed together; without prompts all are different.
    numbers = range(len(lengths)) if prompt_rows is None else prompt_rows.tolist()
    batches: list[list[int]] = []
    n_filled = 0  # tokens in the last minibatch

    for _, neighbours in groupby(order, key=numbers.__getitem__):
        # Neighbours that do not fit into a minibatch of their own are packed one by one.
        group = list(neighbours)
        units = [group]
        if not keeps_groups and sum(lengths[episode] for episode in group) > batch_size:
            units = [[episode] for episode in group]

        for unit in units:
            length = sum(lengths[episode] for episode in unit)
            if not batches or n_filled + length > batch_size:
                batches.append([])
                n_filled = 0
            batches[-1] += unit
            n_filled += length
    return batches


@dataclass(frozen=True)
class PassLimits:
    """Limits of the size of a forward pass; None = no limit. A pass has at least one episode.

    Args:
        tokens: maximum number of tokens that pass through the model, which is what its memory grows with: prompts and
            responses, or those of encoder and decoder, each padded to the longest of the pass.
        response_tokens: maximum number of response tokens, padding not counted.
        shares_prompts: the model computes a prompt once for all of its responses in a pass, so that it counts once.
    """

    tokens: int | None = None
    response_tokens: int | None = None
    shares_prompts: bool = False


@dataclass
class _Pass:
    """Episodes of one forward pass, and what its size depends on."""

    episodes: list[int] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)  # numbers of the different prompts
    prompt_len: int = 0  # of the longest
    response_len: int = 0  # of the longest
    response_tokens: int = 0

    def add(self, other: _Pass) -> None:
        """Add the episodes of another pass."""
        self.episodes += other.episodes
        self.prompts |= other.prompts
        self.prompt_len = max(self.prompt_len, other.prompt_len)
        self.response_len = max(self.response_len, other.response_len)
        self.response_tokens += other.response_tokens

    def fits_with(self, other: _Pass, limits: PassLimits) -> bool:
        """Return whether the episodes of both are within the limits of one pass."""
        response_tokens = self.response_tokens + other.response_tokens
        if limits.response_tokens is not None and response_tokens > limits.response_tokens:
            return False
        if limits.tokens is None:
            return True

        # The matrices [n_prompts, prompt_len] and [n, response_len] of the pass. If padding were not counted, one long
        # response among short ones could need many times the memory of `tokens`.
        n = len(self.episodes) + len(other.episodes)
        n_prompts = n
        if limits.shares_prompts:
            n_prompts = len(self.prompts) + len(other.prompts - self.prompts)
        prompt_tokens = n_prompts * max(self.prompt_len, other.prompt_len)
        return prompt_tokens + n * max(self.response_len, other.response_len) <= limits.tokens


def pack_passes(
    episodes: EpisodeBatch, limits: PassLimits, units: Sequence[int] | None = None, n_together: int = 1
) -> list[list[int]]:
    """Group whole episodes into forward passes within some limits.

    As in `pack_episodes`, episodes are added in their order, and neighbours with the same prompt together if they fit
    into one pass.

    Args:
        episodes: `n` episodes.
        limits: of each pass.
        units: which runs of `n_together` consecutive episodes to pack; default: all.
        n_together: number of consecutive episodes with the same prompt that stay together.

    Returns:
        The episodes of each pass.

    Examples:
        Prompts of 4 tokens with responses of 2. Where both responses share their prompt, they are 8 tokens, not 12.

        >>> from rl4lms_like.core.episodes import EpisodeBatch, PassLimits, pack_passes
        >>> ids, mask = torch.zeros(4, 4).long(), torch.ones(4, 4).bool()
        >>> episodes = EpisodeBatch(
        ...     ids, mask, ids[:, :2], mask[:, :2], mask[:, 0], prompt_rows=torch.tensor([0, 0, 1, 1])
        ... )
        >>> pack_passes(episodes, PassLimits(tokens=8))
        [[0], [1], [2], [3]]
        >>> pack_passes(episodes, PassLimits(tokens=8, shares_prompts=True))
        [[0, 1], [2, 3]]
    """
    layout = episodes.layout
    prompt_lengths = layout.prompt_lengths.tolist()
    response_lengths = layout.response_lengths.tolist()
    rows = range(episodes.n_episodes) if layout.prompt_rows is None else layout.prompt_rows.tolist()

    def of(units: Sequence[int]) -> _Pass:
        """Return a pass of some units: unit u has the episodes from n_together * u on."""
        batch = _Pass()
        for unit in units:
            for episode in range(n_together * unit, n_together * (unit + 1)):
                prompt_len = prompt_lengths[episode]
                response_len = response_lengths[episode]
                batch.add(_Pass([episode], {rows[episode]}, prompt_len, response_len, response_len))
        return batch

    passes: list[_Pass] = []
    all_units = range(episodes.n_episodes // n_together) if units is None else units
    for _, group in groupby(all_units, key=lambda unit: rows[n_together * unit]):
        # Neighbours that do not fit into a pass of their own are packed one by one.
        neighbours = list(group)
        additions = [of(neighbours)]
        if not _Pass().fits_with(additions[0], limits):
            additions = [of([unit]) for unit in neighbours]

        for addition in additions:
            if passes and passes[-1].fits_with(addition, limits):
                passes[-1].add(addition)
            else:
                passes.append(addition)
    return [batch.episodes for batch in passes]


def own_batches(
    episodes: EpisodeBatch, limits: PassLimits, ranks: Ranks, n_together: int = 1, *, in_step: bool = False
) -> list[list[int]]:
    """Return this process's part of some episodes, in forward passes within `limits`.

    Each `n_together` consecutive episodes, which have the same prompt, stay together. There is no pass if there are
    too few episodes for all processes. Sharded forward passes are collective: with `in_step`,
    empty passes are added, which do not count, so that all processes make equally many.
    """
    # Units of `n_together` episodes are shared out by their numbers of response tokens.
    sizes = episodes.layout.response_lengths.view(-1, n_together).sum(dim=1).tolist()  # [n_units]
    passes = pack_passes(episodes, limits, ranks.share(sizes), n_together)

    # Every process computes the numbers of all others from the same sizes, so nothing has to be sent.
    if in_step:
        n_passes = [
            len(pack_passes(episodes, limits, ranks.share(sizes, rank), n_together)) for rank in range(ranks.size)
        ]
        passes += [[]] * (max(n_passes) - len(passes))
    return passes
