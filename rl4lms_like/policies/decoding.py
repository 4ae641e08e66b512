"""Loop that samples responses token by token from a decoder-only model.

    contexts ─ read once per different one ─> keys and values in one buffer ─┐
           ┌──────────────────────────────────────────────────────────────────┘
           └─> logits ─ processors of `generate` ─> probabilities ─ one uniform number ─> token ─ read ─> logits ...

`DecodeLoop.__call__` is the loop. It is the `custom_generate` of transformers' `generate`, which prepares the logits
processors and stopping criteria of all its arguments; only the steps are different:

keys and values        are written into a buffer of the full length, instead of copying all of them in every step
sampling               is the inverse of the cumulated probabilities, found in two levels, at one number per token
log-probs              of the sampled tokens are returned, so that they need no pass of their own

A number belongs to a row and a column of the response: a row's text depends neither on the rows after it nor on when
others end, except that rounding depends on the size of a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

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


class DecodeLoop:
    """Token-by-token generation as a `custom_generate` of transformers; valid for one call of `generate`.

    Args:
        mask: `[n, prompt_len]`, True on real tokens of the prompts, which are padded on the left.
        shares_prompts: read equal prompts once.
        with_entropy: record entropies. No token may be excluded: its logit of -inf has no product with a probability.
    """

    def __init__(self, mask: Tensor, *, shares_prompts: bool, with_entropy: bool = False) -> None:
        self.mask = mask
        self.shares_prompts = shares_prompts
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
        text = F.pad(input_ids, (0, n_steps), value=generation_config.pad_token_id)  # [n, prompt_len + n_steps]
        log_prob = torch.zeros(n, n_steps, device=device)
        entropy = torch.zeros_like(log_prob) if self.with_entropy else None
        is_over = torch.zeros(n, dtype=torch.bool, device=device)

        contexts = Contexts(model)
        logits = contexts.read_prompts(input_ids, self.mask, n_steps=n_steps, once=self.shares_prompts)  # [n, vocab]
        for step in range(n_steps):
            column = prompt_len + step
            scores = logits_processor(text[:, :column], logits)
            probs = scores.softmax(dim=-1)
            token = sampled(probs, uniforms[:, step]) if generation_config.do_sample else probs.argmax(dim=-1)
            log_prob[:, step] = probs.gather(1, token[:, None])[:, 0].log()
            if entropy is not None:
                entropy[:, step] = _entropy(probs, scores, token, log_prob[:, step])

            # What follows an end is padding, which is read like a token.
            text[:, column] = torch.where(is_over, text[:, column], token)
            is_over |= stopping_criteria(text[:, : column + 1], scores)
            if step + 1 == n_steps or (_checks_end(step, device) and bool(is_over.all())):
                break
            logits = contexts.read(text[:, column : column + 1])

        response = slice(prompt_len, column + 1)
        return Decoded(text[:, response], log_prob[:, : step + 1], None if entropy is None else entropy[:, : step + 1])


def _checks_end(step: int, device: torch.device) -> bool:
    """Return whether to ask after this step if all responses have ended: a GPU has to finish its work to answer."""
    return device.type == "cpu" or (step + 1) % CHECK_EVERY == 0


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
    return (block * BLOCK + _first_above(inside, target - before))[:, 0]


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

    Args:
        model: decoder-only model whose cache has the keys and values of all tokens; see `keeps_all_keys`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.cache = DynamicCache(config=model.config)
        self._known = set(inspect.signature(model.forward).parameters)
        self._mask: Tensor | None = None  # [n, full length]; None if no text is padded
        self._n_read = 0  # columns of the cache
        self._positions = torch.empty(0)  # of the next token, [n, 1]

    def read_prompts(self, ids: Tensor, mask: Tensor, *, n_steps: int, once: bool) -> Tensor:
        """Read prompts `[n, prompt_len]` and make room for `n_steps` tokens; return the logits `[n, vocab]`.

        Args:
            ids: padded on the left.
            mask: True on real tokens.
            n_steps: maximum number of tokens that are read afterwards.
            once: read equal prompts once.
        """
        n, self._n_read = ids.shape
        rows = torch.arange(n, device=ids.device)  # of each text in what is read

        # With the mask: the id of padding may also be that of a real token.
        different, different_mask = ids, mask
        if once:
            pairs, rows = torch.cat([ids, mask.long()], dim=1).unique(dim=0, return_inverse=True)
            different, different_mask = pairs[:, : self._n_read], pairs[:, self._n_read :].bool()

        # Positions from the mask, as in teacher forcing. Without padding, attention needs no mask.
        positions = (different_mask.long().cumsum(dim=1) - 1).clamp_min(0)
        if not bool(mask.all()):
            self._mask = F.pad(mask, (0, n_steps), value=True).long()
        with _contiguous_head(self.model):
            logits = self._forward(different, None if self._mask is None else different_mask.long(), positions)

        # From here on each text has keys and values of its own.
        self._positions = positions[rows, -1:] + 1
        length = self._n_read + n_steps
        layers: list[Any] = self.cache.layers
        self.cache.layers = [BufferLayer(layer.keys, layer.values, rows, length) for layer in layers]
        return logits[rows]

    def read(self, tokens: Tensor) -> Tensor:
        """Read one token of each text `[n, 1]`; return the logits of the next one `[n, vocab]`."""
        self._n_read += 1
        mask = None if self._mask is None else self._mask[:, : self._n_read]
        logits = self._forward(tokens, mask, self._positions)
        self._positions = self._positions + 1
        return logits

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        # Families differ in which of these arguments they have.
        optional = {"position_ids": positions, "logits_to_keep": 1}
        known = {name: value for name, value in optional.items() if name in self._known}
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, **known)
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
