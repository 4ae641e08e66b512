"""Loop that samples responses token by token from a decoder-only model.

    contexts ─ read once per different one ─> keys and values in one buffer ─┐
           ┌──────────────────────────────────────────────────────────────────┘
           └─> logits ─ processors of `generate` ─> probabilities ─ one uniform number ─> token ─ read ─> logits ...

`DecodeLoop.__call__` is the loop. It is the `custom_generate` of transformers' `generate`, which prepares the logits
processors and stopping criteria of all its arguments; only the steps are different:

keys and values        are written into a buffer of the full length, instead of copying all of them in every step
sampling               is the inverse of the cumulated probabilities, found in two levels, at one number per token
log-probs              of the sampled tokens are returned, so that they need no pass of their own
responses that ended   are not computed any further once they are half of those that are
contexts               of a dialogue keep their keys and values, so that a turn reads only what is new

A number belongs to a row and a column of the response: a row's text depends neither on the rows after it nor on when
others end, except that rounding depends on the size of a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.policies.generating_weights import Forwards
from rl4lms_like.system.errors import ModelError

BLOCK = 256
"""Number of tokens whose probabilities are summed in the first level of the sampling."""

CHECK_EVERY = 8
"""Number of tokens after which a GPU is asked whether all responses have ended. Each question waits for it."""


class Decoded(NamedTuple):
    """Responses `[n, length]`; what follows a response's end is without meaning.

    Args:
        response_ids: tokens.
        log_prob: log-probs of the tokens in the distribution that was sampled from, after all processing by `generate`;
            without processors it is the model's own. float32.
        entropy: entropies of these distributions, float32; None if they are not recorded.
    """

    response_ids: Tensor
    log_prob: Tensor
    entropy: Tensor | None = None

    def recorded(self, episodes: EpisodeBatch) -> EpisodeBatch:
        """Return the episodes with the log-probs of their actions, and their entropies if these are recorded.

        Raises:
            ModelError: log-probs are not finite; NaN in the weights makes all of them NaN.
        """
        log_prob = self.log_prob[episodes.response_mask]  # [n_tokens]
        if not bool(log_prob.isfinite().all()):
            raise ModelError("the policy has diverged: its token probabilities are invalid (NaN or infinite)")
        entropy = None if self.entropy is None else self.entropy[episodes.response_mask]
        return replace(episodes, behavior_log_prob=log_prob, behavior_entropy=entropy)


class RowState(Protocol):
    """Something with a state of each row of a batch."""

    def select(self, rows: Tensor) -> None:
        """Keep the states of some rows, in the order of the index `[k]`."""


class DecodeLoop:
    """Token-by-token generation as a `custom_generate` of transformers; valid for one call of `generate`.

    Args:
        mask: `[n, prompt_len]`, True on real tokens of the prompts, which are padded on the left.
        shares_prompts: read equal prompts once.
        contexts: texts that an earlier call has read, each the beginning of the prompt in the same row; the prompts and
            their responses are added. No row is left out then.
        row_states: processors and criteria with a state of each row; their `select` is called when ended rows are left
            out of the computation. None leaves out none.
        with_entropy: record entropies. No token may be excluded: its logit of -inf has no product with a probability.
    """

    def __init__(
        self,
        mask: Tensor,
        *,
        shares_prompts: bool,
        contexts: Contexts | None = None,
        row_states: Sequence[RowState] | None = (),
        with_entropy: bool = False,
    ) -> None:
        self.mask = mask
        self.shares_prompts = shares_prompts
        self.contexts = contexts
        self.row_states = row_states if contexts is None else None
        self.with_entropy = with_entropy

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Callable[[Tensor, Tensor], Tensor],
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **_: Any,
    ) -> Decoded:
        """Continue the prompts `[n, prompt_len]`; the arguments are those that `generate` passes."""
        n, prompt_len = input_ids.shape
        n_steps = generation_config.max_length - prompt_len
        device = input_ids.device

        # One number per token, row by row, from the processor's generator also on a GPU: a row's do not depend on n.
        uniforms = torch.rand(n, n_steps, dtype=torch.float64).to(device, non_blocking=True)
        response = input_ids.new_full((n, n_steps), generation_config.pad_token_id)
        log_prob = torch.zeros(n, n_steps, device=device)
        entropy = torch.zeros_like(log_prob) if self.with_entropy else None

        # Of the rows that are computed, k of n: prompt and response, and whether it has ended.
        rows = torch.arange(n, device=device)
        text = torch.cat([input_ids, response], dim=1)  # [k, prompt_len + n_steps]
        is_over = torch.zeros(n, dtype=torch.bool, device=device)

        contexts = Contexts(model) if self.contexts is None else self.contexts
        logits = contexts.read_texts(input_ids, self.mask, n_steps=n_steps, once=self.shares_prompts)  # [k, vocab]
        for step in range(n_steps):
            column = prompt_len + step
            scores = logits_processor(text[:, :column], logits)
            probs = scores.softmax(dim=-1)
            token = sampled(probs, uniforms[rows, step]) if generation_config.do_sample else scores.argmax(dim=-1)
            token_log_prob = probs.gather(1, token[:, None])[:, 0].log()
            if entropy is not None:
                entropy[rows, step] = _entropy(probs, scores, token, token_log_prob)

            # What follows an end is padding, which is read like a token.
            text[:, column] = torch.where(is_over, text[:, column], token)
            response[rows, step] = text[:, column]
            log_prob[rows, step] = token_log_prob
            is_over = is_over | stopping_criteria(text[:, : column + 1], scores)
            if step + 1 == n_steps:
                break

            # How many have ended? A GPU has to finish its work to answer.
            if device.type == "cpu" or (step + 1) % CHECK_EVERY == 0:
                n_over = int(is_over.sum())
                if n_over == len(rows):
                    break
                if self.row_states is not None and 2 * n_over >= len(rows):
                    kept = (~is_over).nonzero()[:, 0]
                    rows, text, is_over = rows[kept], text[kept], is_over[kept]
                    for state in (contexts, *self.row_states):
                        state.select(kept)
            logits = contexts.read(text[:, column : column + 1], is_real=~is_over)

        length = step + 1
        return Decoded(response[:, :length], log_prob[:, :length], None if entropy is None else entropy[:, :length])


def _entropy(probs: Tensor, scores: Tensor, token: Tensor, log_prob: Tensor) -> Tensor:
    """Return the entropies `[n]` of distributions `[n, vocab]`, given a token's log-prob in each `[n]`."""
    # H = -Σ p log p = log Z - Σ p z, and log Z = z - log p for any token. The sum is a batch of dot products.
    log_normalizer = scores.gather(1, token[:, None])[:, 0] - log_prob
    return log_normalizer - torch.bmm(probs[:, None], scores[:, :, None]).view(-1)


def sampled(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token at which the cumulated probability exceeds a uniform number, for each row `[n]`.

    Two levels: cumulated sums of blocks of tokens, then those within one block. In float64: in float32 the cumulated
    sum of a large vocabulary has an error of about 1e-5, which is more than many tokens' probability.

    Args:
        probs: `[n, vocab]`; their sum need not be exactly 1.
        uniforms: `[n]`, float64, in [0, 1).
    """
    blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # [n, n_blocks, BLOCK]
    ends = blocks.sum(dim=2, dtype=torch.float64).cumsum(dim=1)  # cumulated up to each block's end, [n, n_blocks]
    target = uniforms[:, None] * ends[:, -1:]
    block = _first_above(ends, target)  # [n, 1]

    # Relative to what precedes the block: the cumulated probability within it, [n, BLOCK].
    before = F.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.take_along_dim(block[:, :, None], dim=1)[:, 0].double().cumsum(dim=1)
    token = block * BLOCK + _first_above(inside, target - before)
    return token.clamp_max_(probs.shape[1] - 1)[:, 0]  # only NaN can be beyond the vocabulary


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """Return the first position with a cumulated sum `[n, k]` above the target `[n, 1]`, as `[n, 1]`.

    A position of probability 0 has the same sum as the one before it, so that it is never the first. Where rounding
    puts the target at the total, it is the last position with a probability. NaN gives some valid position.
    """
    first = torch.searchsorted(cumulated, target, right=True)
    last = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())
    return torch.minimum(first, last).clamp_max_(cumulated.shape[1] - 1)


class Contexts:
    """Texts that a model has read: their keys and values, which the tokens after them attend to.

    turn 1    padding | prompt | turn 1, holes
    mask          0 0      1 1      1 1      0
    turn 2    padding | prompt, turn 1 | padding, answer 1 | turn 2, holes
    mask            0        1 1   1 1         0       1 1      1 1      0

    A hole is no token: it is masked, and positions count only real tokens. Before a turn the holes are moved to the
    padding: there are never many more columns than tokens of the longest text.

    Args:
        model: decoder-only model that `keeps_all_keys`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.cache = DynamicCache(config=model.config)
        self.forwards: Forwards | None = None  # of layers, with copies of their weights
        self._known = set(inspect.signature(model.forward).parameters)
        self._n_read = 0  # columns that have keys and values
        self._ids = torch.empty(0)  # [n, n_read and room for more]
        self._mask = torch.empty(0)  # the same, bool
        self._positions = torch.empty(0)  # of the next token, [n, 1]
        self._has_holes = False  # attention needs the mask

    def select(self, rows: Tensor) -> None:
        """Keep some of the texts, in the order of the index `[k]`; nothing happens before anything is read."""
        if self._n_read == 0:
            return
        for name in ("_ids", "_mask", "_positions"):
            setattr(self, name, getattr(self, name)[rows])
        self._reserve(rows, self._mask.shape[1])

    def read_texts(self, ids: Tensor, mask: Tensor, *, n_steps: int, once: bool) -> Tensor:
        """Read what is new in texts `[n, length]`, and make room for `n_steps` tokens.

        Args:
            ids: whole texts, padded on the left. Each begins with what was read of the text in the same row.
            mask: True on real tokens.
            n_steps: maximum number of tokens that are read afterwards.
            once: read equal texts once.

        Returns:
            The logits of the next tokens `[n, vocab]`.

        Raises:
            RuntimeError: a text does not continue what was read.
        """
        is_first = self._n_read == 0
        rows = torch.arange(len(ids), device=ids.device)  # of each text in what is read
        if is_first:
            self._ids, self._mask = ids[:, :0], mask[:, :0]
        n_before = self._mask[:, : self._n_read].sum(dim=1, keepdim=True)  # real tokens, [n, 1]
        if is_first:
            new_ids, new_mask = ids, mask  # [n, width]
        else:
            new_ids, new_mask = self._new(ids, mask, n_before)
            self._close_holes(int(n_before.max()), room=new_ids.shape[1] + n_steps)

        # With room for the tokens that follow, which are no holes as long as they are generated.
        self._ids = F.pad(torch.cat([self._ids[:, : self._n_read], new_ids], dim=1), (0, n_steps))
        self._mask = F.pad(torch.cat([self._mask[:, : self._n_read], new_mask], dim=1), (0, n_steps), value=True)
        self._has_holes = not bool(self._mask.all())
        self._n_read += new_ids.shape[1]

        # With the mask: the id of padding may also be that of a real token.
        attended = self._mask[:, : self._n_read]
        if is_first and once:
            pairs, rows = torch.cat([ids, mask.long()], dim=1).unique(dim=0, return_inverse=True)
            new_ids, new_mask = pairs[:, : ids.shape[1]], pairs[:, ids.shape[1] :].bool()
            attended, n_before = new_mask, n_before[: len(pairs)]

        # Positions from the mask, as in teacher forcing.
        positions = (n_before + new_mask.long().cumsum(dim=1) - 1).clamp_min(0)
        with _contiguous_head(self.model):
            logits = self._forward(new_ids, attended, positions)

        # From here on each text has keys and values of its own.
        if is_first:
            self._reserve(rows, self._mask.shape[1])
        self._positions = positions[rows, -1:] + 1
        return logits[rows]

    def read(self, tokens: Tensor, *, is_real: Tensor) -> Tensor:
        """Read one token of each text `[n, 1]`; return the logits of the next ones `[n, vocab]`.

        Args:
            tokens: ids.
            is_real: `[n]`, False where the token is a text's last one or follows it. The column becomes a hole, so that
                the next turn has a token to read, whose logits choose its first one.
        """
        self._n_read += 1
        logits = self._forward(tokens, self._mask[:, : self._n_read], self._positions)
        self._ids[:, self._n_read - 1] = tokens[:, 0]
        self._mask[:, self._n_read - 1] = is_real
        self._positions = self._positions + 1
        return logits

    def _new(self, ids: Tensor, mask: Tensor, n_before: Tensor) -> tuple[Tensor, Tensor]:
        """Return what follows the first `n_before` `[n, 1]` real tokens of texts `[n, length]`, padded on the left."""
        is_read = mask & (mask.cumsum(dim=1) <= n_before)
        n_new = mask.sum(dim=1, keepdim=True) - n_before
        known = self._ids[:, : self._n_read][self._mask[:, : self._n_read]]
        if int(n_new.min()) < 1 or not torch.equal(ids[is_read], known):
            raise RuntimeError("a text does not continue the one in the same row that was read before")
        columns = slice(ids.shape[1] - int(n_new.max()), None)
        return ids[:, columns], (mask & ~is_read)[:, columns]

    def _close_holes(self, longest: int, *, room: int) -> None:
        """Move the real tokens of each text to the last of `longest` columns, with room for others after them."""
        # A stable order of the mask: padding and holes first, then the tokens in their order, [n, longest].
        mask = self._mask[:, : self._n_read]
        columns = mask.long().argsort(dim=1, stable=True)[:, -longest:]
        self._ids, self._mask = self._ids.gather(1, columns), mask.gather(1, columns)
        self._n_read = longest

        rows = torch.arange(len(columns), device=columns.device)
        of_states = columns[:, None, :, None]  # [n, 1, longest, 1]
        layers: list[Any] = self.cache.layers
        for index, layer in enumerate(layers):
            keys, values = (states.take_along_dim(of_states, dim=2) for states in (layer.keys, layer.values))
            layers[index] = BufferLayer(keys, values, rows, longest + room)

    def _reserve(self, rows: Tensor, length: int) -> None:
        """Copy the keys and values of texts `[n]` into buffers with room for `length` tokens."""
        # One after the other: the old ones are freed.
        layers: list[Any] = self.cache.layers
        for index, layer in enumerate(layers):
            layers[index] = BufferLayer(layer.keys, layer.values, rows, length)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return the logits after the last of `ids` `[n, k]`; `mask` `[n, n_read]` covers all columns so far."""
        # Families differ in which of these arguments they have. Without padding, attention needs no mask.
        optional = {"position_ids": positions, "logits_to_keep": 1}
        known = {name: value for name, value in optional.items() if name in self._known}
        output = self.model(
            input_ids=ids,
            attention_mask=mask.long() if self._has_holes else None,
            past_key_values=self.cache,
            use_cache=True,
            **known,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits


class BufferLayer(DynamicLayer):
    """Keys and values of a layer, in buffers with room for all tokens: reading one copies only that one.

    Args:
        keys: `[n_texts, heads, n_read, d]`, of the tokens so far.
        values: the same.
        rows: which of the texts to copy, `[n]`.
        length: number of tokens that the buffers have room for.
    """

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, length: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._n_read = keys.shape[2]
        self._buffers = []
        for states in (keys, values):
            buffer = states.new_empty(len(rows), states.shape[1], length, states.shape[3])
            buffer[:, :, : self._n_read] = states[rows]
            self._buffers.append(buffer)
        self.keys, self.values = self._views()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values after the others, and return all."""
        start, self._n_read = self._n_read, self._n_read + key_states.shape[2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self._n_read] = states
        self.keys, self.values = self._views()
        return self.keys, self.values

    def _views(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._n_read] for buffer in self._buffers)
        return keys, values


@contextmanager
def _contiguous_head(model: PreTrainedModel) -> Iterator[None]:
    """Let the output layer read contiguous states: for the last positions of long texts, torch copies its weight."""
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


def keeps_all_keys(model: PreTrainedModel) -> bool:
    """Return whether a model's cache has the keys and values of all tokens, and nothing else.

    A sliding window drops tokens, and a recurrent state cannot be continued by several texts.
    """
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)
