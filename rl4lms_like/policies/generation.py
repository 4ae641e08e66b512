"""Generation of episodes with transformers' `generate`.

    prompts [n, prompt_len] ─ generate ─> EpisodeBatch: up to and including each response's first end
                                              token, or the token that completes a stop string

Where arguments and model allow it, the steps of `generate` are those of `policies.decoding`, a faster loop.

Used for rollouts and for all evaluations, of policies and of plain models. Settings of a checkpoint's own
`generation_config` (a temperature, forced tokens, no-repeat rules) are not applied: the YAML file alone configures
sampling. transformers' own defaults apply, so an unset `top_k` is 50.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from rl4lms_like.core.episodes import EpisodeBatch, real_ids, response_mask_until_end
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.stop_strings import KEY as STOP_STRINGS
from rl4lms_like.core.stop_strings import StopStrings, stop_strings_of
from rl4lms_like.engines.arguments import NO_EFFECT, generate_arguments
from rl4lms_like.engines.base import GenerationEngine
from rl4lms_like.policies.arguments import NEUTRAL, UNKNOWN_DISTRIBUTION
from rl4lms_like.policies.decoding import Contexts, Decoded, DecodeLoop, RowState, keeps_all_keys
from rl4lms_like.policies.faster_layers import replaced_forwards
from rl4lms_like.policies.generating_weights import MIN_STEPS, forwards_to_generate
from rl4lms_like.policies.merged_adapters import MergedAdapters
from rl4lms_like.policies.teacher_forcing import aligned, decoder_start_token_id
from rl4lms_like.system.errors import ModelError


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Replace the model's generation config by one with token ids only, within the context."""
    # A new config has none of the checkpoint's settings, only transformers' defaults. The start token is the one that
    # scoring uses, so that both read the same decoder input.
    checkpoint_config = model.generation_config
    start_token_id = decoder_start_token_id(model) if model.config.is_encoder_decoder else None
    model.generation_config = GenerationConfig(
        bos_token_id=getattr(checkpoint_config, "bos_token_id", None),
        pad_token_id=pad_token_id(model.config),
        decoder_start_token_id=start_token_id,
    )
    try:
        yield
    finally:
        model.generation_config = checkpoint_config


def pad_token_id(model_config: PretrainedConfig) -> int:
    """Return the id of masked positions: the model's pad token, else its end-of-text token, else 0."""
    config = model_config.get_text_config()  # of a multimodal model, the part of the language model
    for token in (config.pad_token_id, config.eos_token_id):
        # Some families have several end-of-text tokens.
        if isinstance(token, list | tuple):
            token = token[0]
        if token is not None:
            return int(token)
    return 0


class StopCriterion(StoppingCriteria):
    """Criterion of transformers' `generate` that ends responses at stop strings.

    Args:
        stops: the stop strings.
        prompts: ids of the prompts that the responses continue, without padding; empty ones for an encoder-decoder.
        start: number of tokens before the response.
    """

    def __init__(self, stops: StopStrings, prompts: Sequence[Sequence[int]], start: int) -> None:
        self.stops = stops
        self.prompts = prompts
        self.start = start

    def select(self, rows: Tensor) -> None:
        """Keep the prompts of some rows, which are those of later calls."""
        self.prompts = [self.prompts[row] for row in rows.tolist()]

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return whether each response `[n]` ends with its last token."""
        # The beams of a prompt are rows next to each other.
        n_beams = len(input_ids) // len(self.prompts)
        ends = []
        for index, row in enumerate(input_ids[:, self.start :].tolist()):
            ends.append(self.stops.found_at_end(row, self.prompts[index // n_beams]))
        return torch.tensor(ends, device=input_ids.device)


NOT_SETTABLE = {
    "eos_token_id": "responses end at the end-of-text tokens of the tokenizer and the model; see env.args",
    "num_return_sequences": "one response is generated for each prompt",
    **dict.fromkeys(
        ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
        "only texts are returned",
    ),
}
"""Arguments of transformers' `generate` that this library sets -> the reason."""


def unknown_generation_arguments(generation_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return error messages by key for arguments that are unknown, cannot be set, or have an invalid value."""
    known = [*GenerationConfig().to_dict(), "post_processing_fn"]  # the latter is RL4LMs' own
    messages = {}
    for key, value in generation_kwargs.items():
        if key in NOT_SETTABLE:
            messages[key] = f"cannot be set: {NOT_SETTABLE[key]}"
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            messages[key] = f"not an argument of transformers' generate{hint}"

        # transformers checks all other values, but stop strings are not passed to it (see `core.stop_strings`).
        elif key == STOP_STRINGS and not _are_stop_strings(value):
            messages[key] = f"expected a text or a list of texts, none of them empty, got {value!r}"
        elif key != "post_processing_fn":
            refusal = _refusal(key, value)
            if refusal is not None:
                messages[key] = f"transformers rejects this value: {refusal}"
    return messages


def _are_stop_strings(value: Any) -> bool:
    if value is None:
        return True
    strings = value if isinstance(value, list) else [value]
    return all(isinstance(string, str) and string for string in strings)


def _refusal(key: str, value: Any) -> str | None:
    """Return transformers' error about one argument, or None; its warnings about combinations are silenced."""
    # One argument alone gives warnings that the whole set would not, such as a temperature without `do_sample`.
    warnings_logger = logging.getLogger("transformers.generation.configuration_utils")
    level = warnings_logger.level
    warnings_logger.setLevel(logging.CRITICAL)

    try:
        GenerationConfig(**{key: value})
    except (ValueError, TypeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    finally:
        warnings_logger.setLevel(level)
    return None


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers within the context and restore their state after it. None does nothing."""
    if seed is None:
        yield
        return

    # The CPU's generator is always saved; without `devices` those of all GPUs would be, too.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if device.type == "cpu":  # `torch.manual_seed` also formats a stack trace for each kind of absent accelerator
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


NO_PROMPT = (
    "a prompt has no tokens, but a decoder-only model needs at least one: use the model's begin or end token as the "
    "prompt, for instance <|endoftext|> for GPT-2"
)
"""Error for an empty prompt: the model would continue from padding, at a position that differs between families."""


class FirstTokenTemperature(LogitsProcessor):
    """Logits processor with another temperature for the first token; valid for one `generate` call.

    Args:
        first: temperature of the first token.
        others: temperature of the other tokens.
    """

    def __init__(self, first: float, others: float) -> None:
        self.temperature = first
        self.others = others

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores `[n, vocab]`, divided by the temperature."""
        scores = scores / self.temperature
        self.temperature = self.others
        return scores


class LogProbRecorder(LogitsProcessor):
    """Logits processor that records the log-probs of the sampled tokens and changes nothing; it must be the last one.

    The token of a step is known in the next one, so that only one distribution is stored at a time.

    Args:
        with_entropy: record the entropies of the distributions too.
    """

    def __init__(self, *, with_entropy: bool = False) -> None:
        self._with_entropy = with_entropy
        self._log_probs: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the log-probs of the tokens of the previous step, and return the scores."""
        # The first call records nothing: the last token is still one of the prompt.
        self._record(input_ids[:, -1])
        self._last = scores.log_softmax(dim=-1)

        # H = -Σ p log p of each row, as a batch of dot products: their sum needs no matrix of products.
        if self._with_entropy:
            probs = self._last.exp()
            self._entropies.append(-torch.bmm(probs[:, None], self._last[:, :, None]).view(-1))
        return scores

    def _record(self, tokens: Tensor) -> None:
        if self._last is not None:
            self._log_probs.append(self._last.gather(1, tokens[:, None]).squeeze(1))

    def recorded(self, episodes: EpisodeBatch) -> EpisodeBatch:
        """Return the episodes with the log-probs of their actions, and their entropies if these are recorded.

        Raises:
            ModelError: generation was not token by token.
        """
        # No step follows the last one, in which its tokens would be known.
        self._record(episodes.response_ids[:, -1])
        self._last = None

        # One step per token is what this processor relies on: an assistant model, for instance, proposes several.
        if not self._log_probs or len(self._log_probs) != episodes.response_ids.shape[1]:
            raise ModelError(
                f"log-probs of {len(self._log_probs)} steps do not match responses of {episodes.response_ids.shape[1]} "
                "tokens: remove other generation modes (assistants, prompt lookup) from generation_kwargs"
            )
        log_prob = torch.stack(self._log_probs, dim=1)[episodes.response_mask]
        entropy = torch.stack(self._entropies, dim=1)[episodes.response_mask] if self._with_entropy else None
        return replace(episodes, behavior_log_prob=log_prob, behavior_entropy=entropy)


_WARPERS: dict[str, tuple[Callable[[Any], LogitsProcessor], float]] = {
    "top_k": (TopKLogitsWarper, 0),
    "top_p": (TopPLogitsWarper, 1.0),
    "min_p": (MinPLogitsWarper, 0.0),
    "typical_p": (TypicalLogitsWarper, 1.0),
    "epsilon_cutoff": (EpsilonLogitsWarper, 0.0),
}
"""Argument of `generate` -> the processor that it adds, and the value that adds none; in the order of transformers."""


def separate_warpers(
    arguments: Mapping[str, Any], first_token_temperature: float | None, device: torch.device
) -> tuple[dict[str, Any], list[LogitsProcessor]]:
    """Return arguments of `generate` without those that shape the distribution, and processors with their effect.

    transformers applies its own processors for them after those of the caller, which could not see the distribution
    that is sampled from.

    Args:
        arguments: of `generate`.
        first_token_temperature: temperature of the first token; default: that of all tokens.
        device: device of the model.

    Raises:
        ModelError: an argument changes the distribution in another way.
    """
    remaining = dict(arguments)
    for key in UNKNOWN_DISTRIBUTION:
        if remaining.get(key) is not None:
            raise ModelError(f"the probabilities of sampled tokens are unknown with {key} in generation_kwargs")

    # In the order of transformers: the temperature first, since what is kept of the others depends on it.
    temperature = 1.0 if remaining.get("temperature") is None else remaining["temperature"]
    first = temperature if first_token_temperature is None else first_token_temperature
    processors: list[LogitsProcessor] = []
    if first_token_temperature is not None or temperature != 1:
        processors.append(FirstTokenTemperature(first, temperature))

    for key, (warper, neutral) in _WARPERS.items():
        default = 50 if key == "top_k" else None  # transformers' defaults
        value = remaining.pop(key, default)
        if value is not None and value != neutral:
            processors.append(warper(value))
    if remaining.get("eta_cutoff"):
        processors.append(EtaLogitsWarper(remaining["eta_cutoff"], device=str(device)))

    # Values without effect, where a missing argument would stand for transformers' default.
    return {**remaining, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eta_cutoff": 0.0}, processors


_PLAIN_CACHE = {"max_new_tokens", "min_new_tokens", "eos_token_id", "stopping_criteria", "do_sample", *NEUTRAL}
"""Arguments of `generate` with which each response continues the cache of its prompt, token by token."""
_DECODE_LOOP = {*_PLAIN_CACHE, "suppress_tokens"}
"""Arguments of `generate` that `DecodeLoop` supports; others may have a value without effect."""


def decodes_with_loop(arguments: Mapping[str, Any]) -> bool:
    """Return whether `DecodeLoop` supports the arguments of `generate`.

    Examples:
        >>> decodes_with_loop({"do_sample": True, "top_p": 0.9}), decodes_with_loop({"num_beams": 4})
        (True, False)
    """
    neutral = {**NO_EFFECT, "use_cache": True}
    others = {key: value for key, value in arguments.items() if key not in _DECODE_LOOP}
    return all(value in (None, neutral.get(key)) for key, value in others.items())


def text_inputs(ids: Tensor, mask: Tensor, pictures: Tensor | None) -> dict[str, Tensor]:
    """Return the keyword arguments with which `generate` reads prompts without pictures."""
    return {"input_ids": ids, "attention_mask": mask.long()}


def shared_prompt_inputs(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    pictures: Tensor | None = None,
    inputs_of: Callable[[Tensor, Tensor, Tensor | None], dict[str, Tensor]] = text_inputs,
) -> dict[str, Any] | None:
    """Return prompts as `generate` continues them from the keys and values of all tokens but the last.

    These are computed once for equal prompts.

    Args:
        model: decoder-only model, in a context of `plain_generation`.
        ids: `[n, prompt_len]`, padded on the left.
        mask: `[n, prompt_len]`, True on real tokens.
        pictures: `[n]`, see `EpisodeBatch`.
        inputs_of: returns the keyword arguments with which `generate` reads such prompts.

    Returns:
        The keyword arguments; None if all prompts differ or have one token, or if the model's cache is of another kind.
    """
    # Prompts of a single token have nothing to share, and only keys and values can be cut back by a token.
    if ids.shape[1] == 1 or not keeps_all_keys(model):
        return None

    # With the mask: the id of padding may also be that of a real token. `rows`: each prompt's row in `unique`, [n].
    # Equal texts with different pictures are different prompts.
    columns = [ids, mask.long()]
    if pictures is not None:
        columns.append(pictures[:, None])
    unique, rows = torch.cat(columns, dim=1).unique(dim=0, return_inverse=True)
    if len(unique) == len(ids):
        return None
    prompt_len = ids.shape[1]
    unique_ids = unique[:, :prompt_len]
    unique_mask = unique[:, prompt_len : 2 * prompt_len]
    unique_pictures = None if pictures is None else unique[:, -1]

    # One greedy token: `generate` sets the positions of padded prompts, and no random number is drawn.
    unique_inputs = inputs_of(unique_ids, unique_mask, unique_pictures)
    cache = model.generate(
        **unique_inputs,
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        synced_gpus=False,
    ).past_key_values
    if type(cache) is not DynamicCache:
        return None

    # Without the last prompt token: the model reads it again and returns the logits of the first action.
    cache.crop(-1)
    cache.batch_select_indices(rows)
    inputs: dict[str, Any] = {**text_inputs(ids, mask, None), "past_key_values": cache}

    # The cache has what pictures and types say. Positions have the prompts in their last dimension but one:
    # [u, prompt_len], or [3, u, prompt_len].
    if "position_ids" in unique_inputs:
        inputs["position_ids"] = unique_inputs["position_ids"].index_select(-2, rows)
    return inputs


def _until_stop_string(
    response_ids: Tensor, response_mask: Tensor, terminated: Tensor, *, stops: StopStrings, prompts: Sequence[list[int]]
) -> tuple[Tensor, Tensor]:
    """Return mask `[n, response_len]` and ends `[n]` of responses that are cut after their first stop string."""
    response_mask = response_mask.clone()
    terminated = terminated.clone()
    for row, prompt in enumerate(prompts):
        n_tokens = stops.n_tokens(response_ids[row][response_mask[row]].tolist(), prompt)
        if n_tokens is not None:
            response_mask[row, n_tokens:] = False
            terminated[row] = True
    return response_mask, terminated


class TextGenerator(GenerationEngine):
    """Text generator of a language model; dropout is off during generation.

    Args:
        model: any `AutoModelForCausalLM` or `AutoModelForSeq2SeqLM`.
        generation_kwargs: default arguments of transformers' `generate`.
        prompt_truncation_side: side on which long prompts are truncated.
        bfloat16: compute under bfloat16 autocast.

    Attributes:
        shares_prompts: compute a prompt once for all of its responses, where the model and the arguments of `generate`
            allow it; policies set it by `parity.check_sharing`.
        uses_decode_loop: sample with `DecodeLoop`, where the arguments of `generate` allow it; set to the result of
            `parity.check_decoding`, with the speedup `fast_decoding`.
        packs_weights: generate with packed weights, with the speedup of this name.
        merged_adapters: those that the policy generates with, if it has any.
    """

    has_decode_loop: ClassVar[bool] = True
    """False if `DecodeLoop` cannot read the prompts."""
    has_row_states: ClassVar[bool] = False
    """True if `generate` gets logits processors with a state of each row, so that no row can be left out."""

    pictures: PictureEncoder | None = None
    """Encoder of prompts with pictures; None if the model reads texts only."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        generation_kwargs: Mapping[str, Any] | None = None,
        prompt_truncation_side: Literal["left", "right"] = "left",
        bfloat16: bool = False,
    ) -> None:
        self.model = model
        self.generation_kwargs = dict(generation_kwargs or {})
        self.prompt_truncation_side = prompt_truncation_side
        self.bfloat16 = bfloat16
        self.shares_prompts = True
        self.uses_decode_loop = False
        self.packs_weights = False
        self.merged_adapters: MergedAdapters | None = None

    @property
    def is_encoder_decoder(self) -> bool:
        """True for seq2seq models."""
        return bool(self.model.config.is_encoder_decoder)

    @property
    def prompt_side(self) -> Literal["left", "right"]:
        """Side on which prompts are padded."""
        return "right" if self.is_encoder_decoder else "left"

    def new_contexts(self) -> Contexts | None:
        """Return a new argument `contexts` for the turns of a dialogue; None if each turn has to be read again.

        Each turn is a call with the same object and whole texts as prompts. After `contexts.select(rows)`, the prompts
        of the next call are those of these rows.
        """
        return Contexts(self.model) if self.uses_decode_loop and not self.has_row_states else None

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        *,
        eos_token_ids: Sequence[int],
        max_new_tokens: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        record_log_prob: bool = False,
        record_entropy: bool = False,
        first_token_temperature: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        contexts: Contexts | None = None,
        pictures: Tensor | None = None,
    ) -> EpisodeBatch:
        """Generate one response per prompt.

        Args:
            prompt_ids: `[n, prompt_len]`, padded on either side.
            prompt_mask: `[n, prompt_len]`, True or 1 on real tokens.
            eos_token_ids: tokens that end a response; if empty, all responses reach the length limit.
            max_new_tokens: the environment's limit.
            generation_kwargs: arguments of `generate`; default: those of the constructor.
            seed: seed of the sampling; None uses torch's global generator.
            record_log_prob: store the log-probs of the distribution that is sampled from, after all processing by
                `generate`, as the episodes' `behavior_log_prob`. Requires sampling without beams.
            record_entropy: store its entropies too, as `behavior_entropy`. Requires `record_log_prob`.
            first_token_temperature: temperature of the first token (FIRE sampling, arXiv 2410.21236); default: that of
                all tokens. Requires `record_log_prob`.
            tokenizer: decodes responses; required if the arguments have `stop_strings`.
            dtype: precision of the products of linear layers; default: that of the constructor.
            contexts: what earlier calls have read, each the beginning of the prompt in the same row; see
                `new_contexts`. The result is the same as without them, but for rounding.
            pictures: `[n]`, numbers of the prompts' pictures; see `EpisodeBatch`. For vision-language models only.

        Returns:
            The finished episodes, on the model's device.

        Raises:
            ModelError: the model's probabilities are invalid; a prompt of a decoder-only model has no tokens;
                transformers rejects the arguments; or there are stop strings and no tokenizer.
        """
        # Padding on the side of the family: `generate` continues from the last column of a decoder-only model.
        device = self.model.device
        ids, mask = aligned(prompt_ids.to(device), prompt_mask.bool().to(device), self.prompt_side)
        if not self.is_encoder_decoder and not bool(mask.any(dim=1).all()):
            raise ModelError(NO_PROMPT)

        # Stop strings are this library's own criterion: it ends at the same token as the environment does.
        if generation_kwargs is None:
            generation_kwargs = self.generation_kwargs
        arguments = generate_arguments(
            generation_kwargs,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            is_encoder_decoder=self.is_encoder_decoder,
        )
        stops = None
        strings = stop_strings_of(generation_kwargs)
        if strings:
            if tokenizer is None:
                raise ModelError(f"generation_kwargs have stop_strings {list(strings)}, but the environment has none")
            stops = StopStrings(strings, tokenizer)

        # The mode is restored at the end: evaluations also come in the middle of a training.
        was_training = self.model.training
        self.model.eval()
        try:
            with plain_generation(self.model), seeded(seed, device), self._faster_layers(dtype, arguments, contexts):
                # The recorder is the last processor, so the arguments that transformers would apply after it become
                # processors before it.
                warpers: Sequence[LogitsProcessor] = ()
                if record_log_prob:
                    arguments, warpers = separate_warpers(arguments, first_token_temperature, device)
                return self._episodes(
                    ids,
                    mask,
                    arguments,
                    warpers,
                    stops=stops,
                    record_log_prob=record_log_prob,
                    record_entropy=record_entropy,
                    contexts=contexts,
                    pictures=pictures,
                ).trimmed()
        except RuntimeError as error:
            # torch's message of `multinomial` for NaN, infinite or negative probabilities.
            if "probability tensor contains" not in str(error):
                raise
            raise ModelError(f"the policy has diverged: its token probabilities are invalid ({error})") from error
        finally:
            self.model.train(was_training)

    def _episodes(
        self,
        ids: Tensor,
        mask: Tensor,
        arguments: Mapping[str, Any],
        processors: Sequence[LogitsProcessor] = (),
        *,
        stops: StopStrings | None,
        record_log_prob: bool,
        record_entropy: bool,
        contexts: Contexts | None,
        pictures: Tensor | None,
    ) -> EpisodeBatch:
        """Return the generated episodes, each cut after the response's first end token or stop string."""
        model: Any = self.model
        arguments = dict(arguments)

        # A decoder's sequence begins with its start token, that of a decoder-only model with the prompt.
        start = 1 if self.is_encoder_decoder else ids.shape[1]
        prompts: list[list[int]] = []
        row_states: list[RowState] = []
        if stops is not None:
            prompts = [[] for _ in ids] if self.is_encoder_decoder else real_ids(ids, mask)
            criterion = StopCriterion(stops, prompts, start)
            arguments["stopping_criteria"] = StoppingCriteriaList([criterion])
            row_states.append(criterion)

        # The loop records by itself. Equal prompts are computed once, unless an argument has an unknown effect on the
        # cache (beams reorder it).
        recorder = None
        inputs: Mapping[str, Any] | None = None
        if self.uses_decode_loop and decodes_with_loop(arguments):
            # transformers' processor of this penalty has a state of each row, the length of its padding.
            penalises_repetition = arguments.get("repetition_penalty") not in (None, 1)
            arguments["custom_generate"] = DecodeLoop(
                mask,
                shares_prompts=self.shares_prompts,
                contexts=contexts,
                row_states=None if self.has_row_states or penalises_repetition else row_states,
                with_entropy=record_entropy,
            )
        else:
            if record_log_prob:
                recorder = LogProbRecorder(with_entropy=record_entropy)
                processors = [*processors, recorder]
            if self.shares_prompts and not self.is_encoder_decoder and _PLAIN_CACHE.issuperset(arguments):
                inputs = shared_prompt_inputs(self.model, ids, mask, pictures, self._inputs)
        if inputs is None:
            inputs = self._inputs(ids, mask, pictures)

        try:
            generated: Tensor | Decoded = model.generate(
                **inputs,
                logits_processor=LogitsProcessorList(processors),
                synced_gpus=False,  # processes with split weights generate independently, with gathered ones
                **arguments,
            )
        except (ValueError, TypeError) as error:
            raise ModelError(f"transformers' generate rejects the generation_kwargs: {error}") from error

        # `generate` runs until the last response has ended; a response's columns after its end are cut off here.
        response_ids = generated.response_ids if isinstance(generated, Decoded) else generated[:, start:]
        response_mask, terminated = response_mask_until_end(response_ids, arguments["eos_token_id"] or ())
        if stops is not None:
            response_mask, terminated = _until_stop_string(
                response_ids, response_mask, terminated, stops=stops, prompts=prompts
            )
        episodes = EpisodeBatch(
            ids, mask, response_ids, response_mask, terminated, prompt_side=self.prompt_side, pictures=pictures
        )

        # The loop returns log-probs in any case, and they are checked in any case.
        if isinstance(generated, Decoded):
            recorded = generated.recorded(episodes)
            return recorded if record_log_prob else episodes
        return episodes if recorder is None else recorder.recorded(episodes)

    def _inputs(self, ids: Tensor, mask: Tensor, pictures: Tensor | None) -> dict[str, Tensor]:
        """Return the keyword arguments with which `generate` reads prompts `[n, prompt_len]`."""
        return text_inputs(ids, mask, pictures)

    def _faster_layers(
        self,
        dtype: Literal["float32", "bfloat16"] | None,
        arguments: Mapping[str, Any],
        contexts: Contexts | None,
    ) -> AbstractContextManager[Any]:
        """Compute with this precision (default: that of the constructor) and with packed weights within the block."""
        if self.bfloat16 and dtype != "float32":
            return self._autocast()
        in_bfloat16 = dtype == "bfloat16"
        packs = self.packs_weights and arguments.get("max_new_tokens", 0) >= MIN_STEPS
        if not in_bfloat16 and not packs:
            return nullcontext()

        # The weights do not change between the turns of dialogues: the copies of the first turn serve all.
        if contexts is not None and contexts.forwards is not None:
            return replaced_forwards(contexts.forwards)

        # Merged adapters are those of now, because the policy generates within their `in_use`.
        merged = None
        if packs and self.merged_adapters is not None:
            merged = self.merged_adapters.merged_weights()
        forwards = forwards_to_generate(self.model, in_bfloat16=in_bfloat16, packs=packs, merged=merged)
        if contexts is not None:
            contexts.forwards = forwards
        return replaced_forwards(forwards)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16) if self.bfloat16 else nullcontext()
