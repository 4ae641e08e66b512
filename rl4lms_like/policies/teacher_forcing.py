"""Scoring of whole episodes in one forward pass, from the hidden states at the positions that chose an action.

    causal    input    [pad  p1 p2 p3 | r1 r2 r3]        the state at p3 chose r1, at r1 chose r2, at r2 chose r3
    seq2seq   encoder  [p1 p2 p3 pad]   decoder [start r1 r2]

For these log-probs to equal those of `generate` (measured for twelve families), position ids are computed from the
mask, the attention mask is always passed, seq2seq prompts are padded on the right, and the decoder's start token is
that of the model and never masked.

Where several episodes have the same prompt (`EpisodeBatch.prompt_rows`), it is computed once, if that is exact
(`parity.check_sharing`):

    causal    each prompt once; the responses attend to its keys and values, through which gradients flow back
    seq2seq   the encoder once per prompt; its states are repeated for each response

In training mode every episode has its own prompt, because dropout must be independent and gradient checkpointing
disables the cache of keys and values.

Where no prompt is computed once, a decoder-only model may read the episodes as packed rows (`core.packed_rows`), if
that is exact (`parity.check_packing`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from rl4lms_like.core.devices import to_device
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.packed_rows import PackedRows, RowPacking
from rl4lms_like.core.token_scores import (
    Distributions,
    Head,
    masked_logits,
    masked_scores_of_logits,
    masked_token_scores,
    scores_of_logits,
    token_log_probs,
    token_scores,
)
from rl4lms_like.policies.faster_layers import OneDNNLinear
from rl4lms_like.policies.merged_adapters import MergedAdapters
from rl4lms_like.policies.offloaded_activations import saved_in_main_memory
from rl4lms_like.policies.routing import RoutingRecord, balancing_coefficient, experts_per_token
from rl4lms_like.policies.sharding import ShardedNetwork
from rl4lms_like.system.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class ActionScores(NamedTuple):
    """Scores of all actions from one forward pass; flat `[n_tokens]`, float32.

    Args:
        log_prob: log-prob of the action over the allowed tokens.
        entropy: entropy of the distribution over the allowed tokens.
        raw_log_prob: log-prob of the action over all tokens. Equal to `log_prob` without masks; with masks it has no
            gradient.
        states: hidden states `[n_tokens, d]`, or None if they were not computed.
    """

    log_prob: Tensor
    entropy: Tensor
    raw_log_prob: Tensor
    states: Tensor | None


class EpisodeScores(NamedTuple):
    """Scores that a rollout stores; flat `[n_tokens]`, float32.

    `log_prob` and `entropy` are over the allowed tokens, `raw_log_prob` is over all tokens; without masks both
    log-probs are equal. The KL is that of the full distributions, `raw_log_prob - ref_log_prob`. Without a reference
    model `ref_log_prob` equals `raw_log_prob`, so the KL is 0.
    """

    values: Tensor
    log_prob: Tensor
    entropy: Tensor
    ref_log_prob: Tensor
    raw_log_prob: Tensor


class EpisodeReader(ABC):
    """Base class for scoring episodes with a language model.

    Attributes:
        model: the language model.
        prompt_side: side on which prompts are padded.
        is_encoder_decoder: True for seq2seq models.
        head_scale: scale of the linear head, or None if logits need the model's own forward; see `probe_head`.
        shares_prompts: compute a prompt once for all of its responses; see `parity.check_sharing`.
        packing: compute hidden states of packed rows, where its choice is not padded ones; see `parity.check_packing`.
        network: the model's weights if they are split over several processes.
        balancing_coefficient: of the balancing loss of a mixture of experts; 0 if the model has none.
    """

    prompt_side: ClassVar[Literal["left", "right"]]
    is_encoder_decoder: ClassVar[bool]

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.head_scale: float | None = None
        self.shares_prompts = False
        self.packing: RowPacking | None = None
        self.network: ShardedNetwork | None = None
        self.balancing_coefficient = balancing_coefficient(model)
        self._routing_record: RoutingRecord | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model, where episodes must be."""
        return self.model.device

    def split_weights(self, mesh: DeviceMesh, *, reshard_after_forward: bool = True) -> ShardedNetwork:
        """Split the model's weights over all processes; see `ShardedNetwork`."""
        network = ShardedNetwork(self.model, mesh, reshard_after_forward=reshard_after_forward)
        self._use(network)
        return network

    def _use(self, network: ShardedNetwork) -> None:
        """Let the methods that call modules of the model be forward passes of torch: its hooks gather the weights."""
        self.network = network
        for name in ("states", "final_states", "logits", "call"):
            setattr(self, name, partial(network.call, getattr(self, name)))

    def offload_activations(self, merged_adapters: MergedAdapters | None) -> None:
        """Save the activations of passes with gradients in main memory from now on; see `offloaded_activations`.

        Args:
            merged_adapters: of the model, if it has any: their weights are in memory in any case.
        """

        def offloading(compute: Callable[[EpisodeBatch], Tensor], episodes: EpisodeBatch) -> Tensor:
            if not torch.is_grad_enabled():
                return compute(episodes)
            merged = [] if merged_adapters is None else merged_adapters.weights
            with saved_in_main_memory(chain(self.model.parameters(), self.model.buffers(), merged)):
                return compute(episodes)

        # The passes of the model only. Log-probs are computed from their outputs, and differentiated first.
        self.states = partial(offloading, self.states)  # type: ignore[method-assign]
        self.logits = partial(offloading, self.logits)  # type: ignore[method-assign]

    def gathered(self) -> AbstractContextManager[None]:
        """Keep split weights whole within the block; see `ShardedNetwork.gathered`."""
        return nullcontext() if self.network is None else self.network.gathered()

    @contextmanager
    def recorded_routing(self) -> Iterator[RoutingRecord]:
        """Record how the first pass over episodes within the block sends tokens to experts.

        Only for models with a balancing loss.
        """
        self._routing_record = RoutingRecord()
        try:
            yield self._routing_record
        finally:
            self._routing_record = None

    @abstractmethod
    def states(self, episodes: EpisodeBatch) -> Tensor:
        """Return the hidden states that chose the actions `[n_tokens, d]`."""

    @abstractmethod
    def final_states(self, episodes: EpisodeBatch) -> Tensor:
        """Return the hidden state after each episode's last token `[n, d]`."""

    @abstractmethod
    def logits(self, episodes: EpisodeBatch) -> Tensor:
        """Return the model's own logits for each action `[n_tokens, vocab]`."""

    @abstractmethod
    def next_token_logits(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the logits `[n, vocab]` of the token after an environment's observation."""

    def fresh(self) -> EpisodeReader:
        """Return a new reader of the same model, which computes each prompt separately, neither compiled nor packed."""
        reader = type(self)(self.model)
        if self.network is not None:
            reader._use(self.network)
        return reader

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Return the result of a function that calls modules of the model; see `ShardedNetwork.call`."""
        return work(*args)

    def scored_logits(self, episodes: EpisodeBatch) -> Tensor:
        """Return the logits of the distributions that are scored `[n_tokens, vocab]`: the model's own."""
        return self.logits(episodes)

    def head(self) -> Head:
        """Return the output layer of the distributions that are scored, if `probe_head` has found a linear one."""
        assert self.head_scale is not None
        return current_head(self.model, self.head_scale)

    @torch.no_grad()
    def probe_head(self, probe: EpisodeBatch) -> None:
        """Set `head_scale`: test on some episodes if a linear head reproduces the model's logits."""
        states = self.states(probe)
        self.head_scale = linear_head_scale(self.model, states, self.logits(probe))

    def scores(self, episodes: EpisodeBatch, *, logits_budget: int) -> ActionScores:
        """Compute log-prob and entropy of each action over the allowed tokens.

        Args:
            episodes: episodes to score; see `EpisodeBatch.allowed`.
            logits_budget: maximum number of logits kept for the backward pass.
        """
        actions = episodes.actions  # [n_tokens]
        allowed = episodes.allowed  # [n_tokens, n_bytes], or None

        # No linear head: the model's forward computes the logits of all actions, [n_tokens, vocab], at once.
        if self.head_scale is None:
            logits = self.scored_logits(episodes)
            if allowed is not None:
                return ActionScores(*masked_scores_of_logits(logits, actions, allowed), states=None)
            log_prob, entropy = scores_of_logits(logits, actions)
            return ActionScores(log_prob, entropy, log_prob, states=None)

        # With one, from the hidden states [n_tokens, d], and only as many logits at a time as the budget allows.
        states = self.states(episodes)
        head = self.head()
        if allowed is not None:
            scores = masked_token_scores(states, head, actions, allowed, logits_budget=logits_budget)
            return ActionScores(*scores, states=states)
        log_prob, entropy = token_scores(states, head, actions, logits_budget=logits_budget)
        return ActionScores(log_prob, entropy, log_prob, states=states)

    @torch.no_grad()
    def log_probs(self, episodes: EpisodeBatch, *, logits_budget: int) -> Tensor:
        """Compute the log-probs of `scores` alone for episodes without masks, without gradients.

        A reference needs no more.
        """
        assert episodes.allowed is None
        if self.head_scale is None:
            return self.scores(episodes, logits_budget=logits_budget).log_prob

        # The head after the pass, which gathers split weights.
        states = self.states(episodes)
        head = self.head()
        return token_log_probs(states, head, episodes.actions, logits_budget=logits_budget)

    def action_logits(self, episodes: EpisodeBatch) -> Tensor:
        """Return the logits `[n_tokens, vocab]` that `scores` uses, float32, twice differentiable."""
        if self.head_scale is None:
            logits = self.scored_logits(episodes)
        else:
            # The product with the head in float32, as in `scores`.
            states = self.states(episodes)
            with torch.autocast(states.device.type, enabled=False):
                logits = self.head().logits(states)
        return logits if episodes.allowed is None else masked_logits(logits, episodes.allowed)

    def distributions(self, episodes: EpisodeBatch, states: Tensor | None = None) -> Distributions:
        """Return the next-token distributions of all actions over the whole vocabulary.

        Args:
            episodes: the episodes; their masks of allowed tokens are ignored.
            states: their hidden states, if they have been computed.
        """
        if self.head_scale is None:
            return Distributions(self.scored_logits(episodes), None)
        if states is None:
            states = self.states(episodes)
        return Distributions(states, self.head())

    def _shared_prompts(self, episodes: EpisodeBatch) -> tuple[Tensor, Tensor] | None:
        """Return `EpisodeBatch.shared_prompts`, or None if each episode's prompt is computed separately."""
        # In training mode a shared prompt would have one dropout mask for all of its responses.
        if not self.shares_prompts or self.model.training:
            return None
        return episodes.shared_prompts()


class PromptCache(DynamicCache):
    """Keys and values of prompts `[u, heads, prompt_len, d]`, to which responses attend; nothing is detached.

    The keys and values of responses are not stored, so that memory does not grow with layers x responses.

    Attributes:
        rows: `[n]`, the prompt of each response; None while the prompts are computed.
    """

    rows: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values of prompts; put those of prompts in front of those of responses."""
        if self.rows is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        # `index_select` copies each prompt for its responses: [u, heads, prompt_len, d] -> [n, heads, prompt_len, d].
        # Its backward pass sums the gradients of the responses into those of their prompt.
        prompts: Any = self.layers[layer_idx]
        keys = prompts.keys.index_select(0, self.rows)
        values = prompts.values.index_select(0, self.rows)
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


class CausalReader(EpisodeReader):
    """Scores episodes with a decoder-only model.

    Args:
        model: any `AutoModelForCausalLM`.
        compile: apply `torch.compile` to its trunk.
    """

    prompt_side = "left"
    is_encoder_decoder = False

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        super().__init__(model)

        # The trunk gives hidden states without computing logits. A model without one returns itself as `base_model`.
        trunk = model.base_model
        self._has_trunk = trunk is not model
        self._trunk: Any = torch.compile(trunk, dynamic=True) if compile else trunk

        # Families differ in what their forward accepts: state-space models, for instance, have no positions.
        self._takes_positions = "position_ids" in inspect.signature(trunk.forward).parameters
        self._takes_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def states(self, episodes: EpisodeBatch) -> Tensor:
        return episodes.flat(self._hidden(episodes, drop_last=True))

    def final_states(self, episodes: EpisodeBatch) -> Tensor:
        # The prompt's last position is column 0, so the last token of a response of k tokens is in column k.
        hidden = self._hidden(episodes, drop_last=False)
        return hidden[torch.arange(len(hidden), device=hidden.device), episodes.response_lengths]

    def logits(self, episodes: EpisodeBatch) -> Tensor:
        logits = self._from_prompt_end(episodes, self._last_logits, drop_last=True)
        return episodes.flat(logits).float()

    def states_of_all_tokens(self, episodes: EpisodeBatch) -> Tensor:
        """Return the hidden states of prompts and responses, except of the last column.

        `[n, prompt_len + response_len - 1, d]`; each episode's prompt is computed separately.
        """
        return self._of_all_tokens(episodes, self._last_hidden)

    def logits_of_all_tokens(self, episodes: EpisodeBatch) -> Tensor:
        """Return the model's own logits at the positions of `states_of_all_tokens`."""
        return self._of_all_tokens(episodes, self._last_logits).float()

    def _of_all_tokens(
        self, episodes: EpisodeBatch, forward: Callable[[dict[str, Any], int, Tensor], Tensor]
    ) -> Tensor:
        inputs = self._inputs(episodes, drop_last=True)

        # In the balancing loss of a mixture of experts, a token counts if another token of its episode follows.
        is_real = torch.cat([episodes.prompt_mask, episodes.response_mask], dim=1)
        is_followed = is_real[:, :-1] & is_real[:, 1:]  # [n, prompt_len + response_len - 1]
        outputs = forward({**inputs, "use_cache": False}, is_followed.shape[1], is_followed)
        if self._routing_record is not None:
            self._routing_record.end_pass()
        return outputs

    def _hidden(self, episodes: EpisodeBatch, *, drop_last: bool) -> Tensor:
        """Return the hidden states from the prompt's last position on `[n, response_len (+ 1), d]`."""
        packed = self._packed(episodes, drop_last=drop_last)
        if packed is not None:
            return self._packed_hidden(episodes, packed, drop_last=drop_last)
        return self._from_prompt_end(episodes, self._last_hidden, drop_last=drop_last)

    def _packed(self, episodes: EpisodeBatch, *, drop_last: bool) -> PackedRows | None:
        """Return the packed rows of prompts and responses; None if padded ones, or shared prompts, are computed."""
        if self.packing is None or self._shared_prompts(episodes) is not None:
            return None

        # The states at an empty prompt are those of its padding.
        layout = episodes.layout
        if not bool(layout.prompt_lengths.all()):
            return None
        lengths = layout.prompt_lengths + layout.response_lengths - int(drop_last)
        return self.packing.packed(lengths, episodes.prompt_ids.shape[1] - layout.prompt_lengths)

    def _packed_hidden(self, episodes: EpisodeBatch, packed: PackedRows, *, drop_last: bool) -> Tensor:
        """Compute `_hidden` in packed rows."""
        ids = torch.cat([episodes.prompt_ids, episodes.response_ids], dim=1)
        positions = to_device(packed.position_ids(), ids.device)
        inputs = {"input_ids": packed.pack(ids, 0), "position_ids": positions, "use_cache": False}

        # In the balancing loss of a mixture of experts, a token counts if another token of its episode follows.
        is_followed = torch.cat([episodes.prompt_mask, episodes.response_mask], dim=1)
        last = episodes.prompt_ids.shape[1] + episodes.response_lengths - 1  # column of each row's last token, [n]
        is_followed = is_followed.scatter(1, last[:, None], value=False)
        hidden = self._last_hidden(inputs, packed.width, packed.pack(is_followed, 0))
        if self._routing_record is not None:
            self._routing_record.end_pass()

        # From the prompt's last token on.
        n_columns = episodes.response_ids.shape[1] + int(not drop_last)
        return packed.from_position(hidden, episodes.layout.prompt_lengths - 1, n_columns)

    def _last_hidden(self, inputs: dict[str, Any], n_last: int, token_weights: Tensor) -> Tensor:
        """Return the hidden states of the last `n_last` positions."""
        if self._has_trunk:
            output = self._trunk(**inputs, **self._router_option)
            hidden = output.last_hidden_state
        else:
            output = self._trunk(**inputs, **self._router_option, output_hidden_states=True)
            hidden = output.hidden_states[-1]
        self._record_routing(output, token_weights)
        return hidden[:, -n_last:]

    def _last_logits(self, inputs: dict[str, Any], n_last: int, token_weights: Tensor) -> Tensor:
        """Return the model's own logits for the last `n_last` positions."""
        # Logits are most of the memory of a pass; without `logits_to_keep` those of the prompt are computed too.
        keep = {"logits_to_keep": n_last} if self._takes_keep else {}
        output = self.model(**inputs, **keep, **self._router_option)
        self._record_routing(output, token_weights)
        return output.logits[:, -n_last:]

    @property
    def _router_option(self) -> dict[str, bool]:
        """Argument of the model's forward by which it returns the logits of its routers, if they are recorded."""
        return {} if self._routing_record is None else {"output_router_logits": True}

    def _record_routing(self, output: Any, token_weights: Tensor) -> None:
        """Record how a part of a pass uses the experts; `token_weights` `[n, length]` is how often a token counts."""
        if self._routing_record is not None:
            self._routing_record.add(output.router_logits, token_weights, experts_per_token(self.model))

    def _from_prompt_end(
        self, episodes: EpisodeBatch, forward: Callable[[dict[str, Any], int, Tensor], Tensor], *, drop_last: bool
    ) -> Tensor:
        """Return the outputs of a forward pass from the prompt's last position on `[n, response_len (+ 1), ...]`."""
        n_response = episodes.response_ids.shape[1] - int(drop_last)

        # In the balancing loss of a mixture of experts, a token counts if another token of its episode follows.
        columns = torch.arange(n_response, device=episodes.response_mask.device)
        is_followed = columns < episodes.response_lengths[:, None] - 1  # [n, n_response]

        shared = self._shared_prompts(episodes)
        if shared is None:
            # One pass over prompt and response. Position -1 - n_response is the prompt's last.
            inputs = self._inputs(episodes, drop_last=drop_last)
            weights = torch.cat([episodes.prompt_mask, is_followed], dim=1)
            outputs = forward({**inputs, "use_cache": False}, n_response + 1, weights)
        else:
            # First pass: the different prompts alone, whose keys and values stay in the cache.
            firsts, rows = shared  # one episode of each prompt [u]; the prompt of each episode [n]
            cache = PromptCache()
            cached = {"past_key_values": cache, "use_cache": True}
            prompts, responses = self._inputs_of_parts(episodes, firsts, rows, drop_last=drop_last)
            n_responses = rows.new_zeros(len(firsts)).index_add(0, rows, torch.ones_like(rows))  # [u]
            weights = episodes.prompt_mask[firsts] * n_responses[:, None]
            outputs = forward(prompts | cached, 1, weights).index_select(0, rows)

            # Second pass: the responses, which attend to the cache.
            if n_response > 0:
                cache.rows = rows
                of_responses = forward(responses | cached, n_response, is_followed)
                outputs = torch.cat([outputs, of_responses], dim=1)

        if self._routing_record is not None:
            self._routing_record.end_pass()
        return outputs

    def _inputs(self, episodes: EpisodeBatch, *, drop_last: bool) -> dict[str, Tensor]:
        """Return the model's inputs for prompt and response, each `[n, prompt_len + response_len (- 1)]`."""
        # The last token of an episode is an action, but chooses none.
        stop = -1 if drop_last else None
        ids = torch.cat([episodes.prompt_ids, episodes.response_ids], dim=1)[:, :stop]
        real = torch.cat([episodes.prompt_mask, episodes.response_mask], dim=1)[:, :stop]

        # Tokens after an episode's end cannot influence earlier positions. Leaving them unmasked means that attention
        # needs no mask in batches without padded prompts.
        mask = torch.cat([episodes.prompt_mask, torch.ones_like(episodes.response_mask)], dim=1)[:, :stop]
        inputs = {"input_ids": ids, "attention_mask": mask.long()}

        # Positions from the mask: those that models compute themselves are numbers of columns, padding included.
        if self._takes_positions:
            inputs["position_ids"] = (real.long().cumsum(dim=1) - 1).clamp_min(0)
        return inputs

    def _inputs_of_parts(
        self, episodes: EpisodeBatch, firsts: Tensor, rows: Tensor, *, drop_last: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the model's inputs for the prompts of `firsts` `[u]`, and for the responses `[n]` that follow them."""
        inputs = self._inputs(episodes, drop_last=drop_last)
        prompt_len = episodes.prompt_ids.shape[1]
        prompts = {name: matrix[firsts, :prompt_len] for name, matrix in inputs.items()}

        # A response's mask covers the columns of its prompt too.
        responses = {name: matrix[:, prompt_len:] for name, matrix in inputs.items()}
        responses["attention_mask"] = inputs["attention_mask"]
        return prompts, responses

    def next_token_logits(self, observation: dict[str, Tensor]) -> Tensor:
        mask = observation["input_attention_mask_pt"].bool()
        ids = observation["input_encoded_pt"].long()

        # As an episode with one action of any id, whose logits are those of the position before it. The observation's
        # prompt and response together are its prompt.
        empty = ids.new_zeros(len(ids), 1)
        episodes = EpisodeBatch(ids, mask, empty, torch.ones_like(empty).bool(), empty[:, 0].bool())
        return self.logits(episodes.trimmed())


class Seq2SeqReader(EpisodeReader):
    """Scores episodes with an encoder-decoder model.

    Args:
        model: any `AutoModelForSeq2SeqLM`.
        compile: apply `torch.compile` to encoder and decoder.

    Raises:
        ModelError: the model has no decoder start token.
    """

    prompt_side = "right"
    is_encoder_decoder = True

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        super().__init__(model)
        self.start_token_id = decoder_start_token_id(model)
        encoder = model.get_encoder()
        decoder = model.get_decoder()
        self._encoder: Any = torch.compile(encoder, dynamic=True) if compile else encoder
        self._decoder: Any = torch.compile(decoder, dynamic=True) if compile else decoder

    def states(self, episodes: EpisodeBatch) -> Tensor:
        # The last token is an action, but chooses none.
        decoder_ids = self._shifted(episodes)[:, :-1]
        return episodes.flat(self._hidden(episodes, decoder_ids))

    def final_states(self, episodes: EpisodeBatch) -> Tensor:
        # Column 0 is the start token, so the last token of a response of k tokens is in column k.
        hidden = self._hidden(episodes, self._shifted(episodes))
        return hidden[torch.arange(len(hidden), device=hidden.device), episodes.response_lengths]

    def logits(self, episodes: EpisodeBatch) -> Tensor:
        # The encoder's states in place of the ids, where it runs once for all responses to a prompt.
        prompts: dict[str, Any] = {"input_ids": episodes.prompt_ids}
        if self._shared_prompts(episodes) is not None:
            prompts = {"encoder_outputs": BaseModelOutput(last_hidden_state=self._encoded(episodes))}

        # No mask for the decoder: what follows an episode's end cannot influence earlier positions.
        output = self.model(
            **prompts,
            attention_mask=episodes.prompt_mask.long(),
            decoder_input_ids=self._shifted(episodes)[:, :-1],
            use_cache=False,
        )
        return episodes.flat(output.logits).float()

    def _shifted(self, episodes: EpisodeBatch) -> Tensor:
        """Return the decoder's input, the response after the start token `[n, 1 + response_len]`."""
        start = episodes.response_ids.new_full((episodes.n_episodes, 1), self.start_token_id)
        return torch.cat([start, episodes.response_ids], dim=1)

    def _hidden(self, episodes: EpisodeBatch, decoder_ids: Tensor) -> Tensor:
        """Return the decoder's hidden states `[n, decoder_len, d]`."""
        return self._decoder(
            input_ids=decoder_ids,
            encoder_hidden_states=self._encoded(episodes),
            encoder_attention_mask=episodes.prompt_mask.long(),
            use_cache=False,
        ).last_hidden_state

    def _encoded(self, episodes: EpisodeBatch) -> Tensor:
        """Return the encoder's states of each episode's prompt `[n, prompt_len, d]`."""
        ids = episodes.prompt_ids
        mask = episodes.prompt_mask.long()
        shared = self._shared_prompts(episodes)
        if shared is None:
            return self._encoder(input_ids=ids, attention_mask=mask).last_hidden_state

        firsts, rows = shared  # one episode of each prompt [u]; the prompt of each episode [n]
        encoded = self._encoder(input_ids=ids[firsts], attention_mask=mask[firsts]).last_hidden_state
        return encoded.index_select(0, rows)

    def next_token_logits(self, observation: dict[str, Tensor]) -> Tensor:
        # An observation is padded on the left; this family's prompts and decoder inputs are padded on the right.
        prompt_ids, prompt_mask = aligned(
            observation["prompt_or_input_encoded_pt"].long(),
            observation["prompt_or_input_attention_mask_pt"].bool(),
            "right",
        )
        context_ids, context_mask = aligned(
            observation["context_encoded_pt"].long(), observation["context_attention_mask_pt"].bool(), "right"
        )
        episodes = EpisodeBatch(
            prompt_ids, prompt_mask, context_ids, context_mask, context_mask[:, 0], prompt_side="right"
        ).trimmed()

        # The context is the decoder's whole input, including the start token, which the environment puts there.
        started = episodes.response_ids[:, 0] == self.start_token_id
        if not bool(started.all()):
            raise ModelError(
                f"the decoder of this model starts with token {self.start_token_id}, but the environment's context "
                f"does not: set env.args.context_start_token to {self.start_token_id}"
            )

        # The next token is chosen at the last real position, which differs from row to row.
        output = self.model(
            input_ids=episodes.prompt_ids,
            attention_mask=episodes.prompt_mask.long(),
            decoder_input_ids=episodes.response_ids,
            use_cache=False,
        )
        last = episodes.lengths - 1
        return output.logits[torch.arange(len(last), device=last.device), last].float()


def decoder_start_token_id(model: PreTrainedModel) -> int:
    """Return the start token of a seq2seq model's decoder.

    Raises:
        ModelError: neither its config nor its generation config defines one.
    """
    # The generation config comes first, since that is what `generate` reads.
    for config in (model.generation_config, model.config):
        token = getattr(config, "decoder_start_token_id", None)
        if token is not None:
            return int(token)
    raise ModelError(f"{type(model).__name__}: the config has no decoder_start_token_id")


def aligned(ids: Tensor, mask: Tensor, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Move each row's real tokens `[n, length]` to one side and drop columns that are padding in all rows."""
    # A stable sort keeps the order of the real tokens and moves them to the given side.
    order = mask.long().sort(dim=1, stable=True, descending=side == "right").indices

    # At least one column, also if all rows are empty.
    width = max(int(mask.sum(dim=1).max()), 1)
    columns = slice(-width, None) if side == "left" else slice(width)
    return ids.gather(1, order)[:, columns], mask.gather(1, order)[:, columns]


MATCH = 3e-6
"""Largest difference of logits, relative to the largest logit, at which a linear head is accepted."""


def current_head(model: PreTrainedModel, scale: float) -> Head:
    """Return the model's output layer as a `Head` with its current weights."""
    layer = model.get_output_embeddings()
    bias = getattr(layer, "bias", None)

    # BART's family keeps the bias of its logits [1, vocab] outside of the layer.
    logits_bias = getattr(model, "final_logits_bias", None)
    if logits_bias is not None:
        logits_bias = logits_bias.reshape(-1)
        bias = logits_bias if bias is None else bias + logits_bias
    return Head(layer.weight, bias, scale, onednn=isinstance(layer, OneDNNLinear))


def linear_head_scale(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> float | None:
    """Return the scale at which `head(hidden)` equals the model's logits.

    Args:
        model: the language model.
        hidden: `[n, d]`, its last hidden states.
        logits: `[n, vocab]`, the logits of its own forward.

    Returns:
        1, `d ** -0.5`, or None if the logits are not such a linear function.
    """
    # Two cases that the probe would not detect in an untrained model: a tanh that changes large logits only, and an
    # adapter of the layer, whose initial contribution is 0.
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None:
        return None
    layer = model.get_output_embeddings()
    if hasattr(layer, "base_layer"):
        return None

    # A head of another form, such as a network of several layers.
    if layer is None or not isinstance(getattr(layer, "weight", None), Tensor):
        return None
    if layer.weight.shape != (logits.shape[-1], hidden.shape[-1]):
        return None

    # T5 with tied embeddings scales its last hidden states by d ** -0.5.
    tolerance = MATCH * float(logits.abs().max().clamp_min(1.0))
    for scale in (1.0, hidden.shape[-1] ** -0.5):
        with torch.no_grad():
            difference = (current_head(model, scale).logits(hidden) - logits).abs().max()
        if float(difference) <= tolerance:
            return scale
    return None
