"""Policies restricted to the tokens that a mask model allows (NLPO, Ramamurthy et al., arXiv 2210.01241).

    policy_model   logits ─ min_new_tokens, suppressed ... ─> only allowed tokens ─ temperature, top_k ... ─> token
    mask_model     older, frozen copy of the policy; separate cache and encoder pass ─ logits ─ rule ─> allowed tokens

Log-probs and entropy are renormalised over the allowed tokens. The masks are stored with the episodes as packed bits
(`EpisodeBatch.allowed`) and never recomputed: different padding or precision could change single bits, and the mask
model may have been updated since. NLPO calls `update_mask_model` at intervals; other algorithms never do.

The mask of a mask model depends only on the rule; if `generation_kwargs` exclude all tokens that the rule allows, all
tokens are allowed. As for every policy, other exclusions of `generation_kwargs` affect the sampling, not the trained
distribution. Without a mask model the rule is applied to the scores after `generation_kwargs` (for instance a penalty
or a minimum length).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.stop_strings import StopStrings
from rl4lms_like.core.token_masks import contains, pack, top_k_mask, top_p_mask, with_tokens
from rl4lms_like.policies.arguments import MaskablePolicyArguments
from rl4lms_like.policies.base import CausalLMActorCriticPolicy, LMActorCriticPolicy, Seq2SeqLMActorCriticPolicy
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.policies.loading import auto_class_of, load_model, save_language_model
from rl4lms_like.policies.lora import copy_sharing_frozen, has_lora, merged
from rl4lms_like.policies.parity import TOLERANCE, TOLERANCE_BFLOAT16, probe_episodes
from rl4lms_like.policies.teacher_forcing import EpisodeReader
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ModelError, ParityError


@dataclass(frozen=True)
class MaskRule:
    """Rule that computes the allowed tokens from logits.

    Args:
        mask_type: `learned_top_p`, `learned_top_k` (logits of the mask model) or `topk` (the policy's own scores).
        top_mask: total probability of the allowed tokens, or their number.
        min_tokens_to_keep: minimum number of allowed tokens with `learned_top_p`.
        special_token_ids: always allowed.
    """

    mask_type: Literal["learned_top_k", "learned_top_p", "topk"]
    top_mask: float
    min_tokens_to_keep: int = 1
    special_token_ids: tuple[int, ...] = ()

    def allowed(self, logits: Tensor) -> Tensor:
        """Return the mask of allowed tokens `[n, vocab]`, bool, for logits `[n, vocab]`."""
        if self.mask_type == "learned_top_p":
            allowed = top_p_mask(logits, self.top_mask, self.min_tokens_to_keep)
        else:
            allowed = top_k_mask(logits, int(self.top_mask))

        # A response must always be able to end.
        return with_tokens(allowed, self.special_token_ids)


class MaskDecoder:
    """Runs the mask model along with a generation, step by step, with its own encoder pass and cache.

    Args:
        model: the mask model, in evaluation mode.
        prompt_ids: `[n, prompt_len]`, padded on the side that the family requires.
        prompt_mask: `[n, prompt_len]`, bool.
        n_beams: rows generated per prompt. Beams are reordered at every step, so with more than one beam the whole
            text is processed at every step, without a cache. This also holds for families without a key-value cache,
            for instance state-space models.
    """

    def __init__(self, model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, *, n_beams: int = 1) -> None:
        self.model: Any = model
        self.prompt_mask = prompt_mask.long().repeat_interleave(n_beams, dim=0)
        self._known = set(inspect.signature(model.forward).parameters)
        self._uses_cache = n_beams == 1 and "past_key_values" in self._known
        self._cache: Any = None

        # The encoder runs once per prompt; its states [n * n_beams, prompt_len, d] are those of all steps.
        self._encoded: Any = None
        if model.config.is_encoder_decoder:
            self._encoded = model.get_encoder()(input_ids=prompt_ids, attention_mask=prompt_mask.long())
            self._encoded.last_hidden_state = self._encoded.last_hidden_state.repeat_interleave(n_beams, dim=0)

    def next_logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits `[n * n_beams, vocab]` of the next token.

        Args:
            input_ids: ids that `generate` has so far: prompt and response, or start token and response.
        """
        # With a cache, only the token of the last step is new.
        new_ids = input_ids if self._cache is None else input_ids[:, -1:]
        if self._encoded is None:
            inputs = self._causal_inputs(new_ids, input_ids.shape[1])
        else:
            inputs = {"encoder_outputs": self._encoded, "decoder_input_ids": new_ids, "past_key_values": self._cache}
            inputs["attention_mask"] = self.prompt_mask

        output = self.model(**inputs, use_cache=self._uses_cache)
        if self._uses_cache:
            self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _causal_inputs(self, new_ids: Tensor, length: int) -> dict[str, Any]:
        """Return a decoder-only model's inputs for `new_ids`, the last of `length` tokens, not in the cache."""
        # What was generated is never padding: a response that has ended is ignored later.
        response_mask = self.prompt_mask.new_ones(len(new_ids), length - self.prompt_mask.shape[1])
        mask = torch.cat([self.prompt_mask, response_mask], dim=1)

        # Positions from the mask, as in teacher forcing. Families differ in which of these arguments they have.
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -new_ids.shape[1] :]
        optional = {"position_ids": positions, "logits_to_keep": 1, "past_key_values": self._cache}
        known = {name: value for name, value in optional.items() if name in self._known}
        return {"input_ids": new_ids, "attention_mask": mask, **known}


class MaskProcessor(LogitsProcessor):
    """Logits processor that excludes and records tokens by mask; valid for one `generate` call.

    transformers applies it after its own rules (`min_new_tokens`, suppressed tokens) and before temperature, `top_k`
    and `top_p`. If those rules exclude all allowed tokens, all tokens are allowed at that step.

    Args:
        rule: rule for the allowed tokens.
        decoder: the mask model; None if the rule uses the policy's own scores.
        record: store the masks.
    """

    def __init__(self, rule: MaskRule, decoder: MaskDecoder | None, *, record: bool = True) -> None:
        self.rule = rule
        self.decoder = decoder
        self.record = record
        self._steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores `[n, vocab]` with -inf for tokens that are not allowed."""
        judged = scores if self.decoder is None else self.decoder.next_logits(input_ids)
        allowed = self.rule.allowed(judged)  # [n, vocab]

        # If transformers' rules exclude all that the mask allows, everything is allowed at that step: a row without
        # any possible token cannot be sampled from.
        possible = scores > torch.finfo(scores.dtype).min  # `remove_invalid_values` turns -inf into this minimum
        nothing_left = ~(allowed & possible).any(dim=1, keepdim=True)
        allowed |= nothing_left

        # Packed at once: 1 bit per token instead of a byte, for every step of the generation.
        if self.record:
            self._steps.append(pack(allowed))
        return scores.masked_fill(~allowed, -torch.inf)

    def recorded(self, episodes: EpisodeBatch) -> Tensor:
        """Return the masks of the episodes' actions `[n_tokens, n_bytes]`.

        Raises:
            ModelError: the masks do not match the episodes, because generation was not token by token.
        """
        # One mask per column of the responses, and each allows the action that was chosen with it: otherwise the steps
        # were those of another mode of generation.
        steps = torch.stack(self._steps, dim=1)  # [n, n_steps, n_bytes]
        if steps.shape[:2] == episodes.response_mask.shape:
            masks = steps[episodes.response_mask]
            if bool(contains(masks, episodes.actions).all()):
                return masks

        raise ModelError(
            f"the masks of {steps.shape[1]} steps do not match responses of {episodes.response_ids.shape[1]} tokens: "
            f"a maskable policy must generate token by token; remove other generation modes (assistants, prompt "
            f"lookup) from alg.policy.args.generation_kwargs"
        )


class MaskedTextGenerator(TextGenerator):
    """Text generator restricted to allowed tokens; the masks are stored in the episodes.

    Beam search is supported, but without recorded masks.

    Args:
        model: the policy's model.
        mask_model: model for the masks, in evaluation mode; None for the policy's own scores. Updated in place.
        rule: rule for the allowed tokens.
        **options: as in `TextGenerator`.
    """

    has_row_states = True

    def __init__(
        self, model: PreTrainedModel, mask_model: PreTrainedModel | None, rule: MaskRule, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.mask_model = mask_model
        self.rule = rule

    def _episodes(
        self,
        ids: Tensor,
        mask: Tensor,
        arguments: Mapping[str, Any],
        processors: Sequence[LogitsProcessor] = (),
        *,
        stops: StopStrings | None,
        **options: Any,
    ) -> EpisodeBatch:
        # A new decoder for each generation: it holds the cache of these prompts.
        n_beams = arguments.get("num_beams") or 1
        decoder = None
        if self.mask_model is not None:
            with self._autocast():
                decoder = MaskDecoder(self.mask_model, ids, mask, n_beams=n_beams)

        # First of the processors: the temperature, `top_k` ... apply to the allowed tokens.
        processor = MaskProcessor(self.rule, decoder, record=n_beams == 1)
        episodes = super()._episodes(ids, mask, arguments, [processor, *processors], stops=stops, **options)
        if not processor.record:
            return episodes
        return replace(episodes, allowed=processor.recorded(episodes))


@torch.no_grad()
def check_mask_parity(reader: EpisodeReader, name: str, *, in_bfloat16: bool = False) -> float:
    """Check on two short prompts that a mask model's step-by-step decoding gives its teacher-forced log-probs.

    Args:
        reader: reader of the mask model, which is in evaluation mode.
        name: name of the model in messages.
        in_bfloat16: check under bfloat16 autocast.

    Returns:
        The largest difference of log-probs, in nats.

    Raises:
        ParityError: it exceeds the tolerance.
    """
    model = reader.model
    probe = probe_episodes(int(model.config.get_text_config().vocab_size), reader.prompt_side).to(model.device)

    # The ids as `generate` has them: the prompt or the start token, then the response.
    start = getattr(reader, "start_token_id", None)
    beginning = probe.prompt_ids if start is None else torch.full_like(probe.prompt_ids[:, :1], start)
    ids = torch.cat([beginning, probe.response_ids], dim=1)

    # Step by step, each with the ids before the token that it chooses, and the same in one pass.
    n_steps = probe.response_ids.shape[1]
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=in_bfloat16):
        decoder = MaskDecoder(model, probe.prompt_ids, probe.prompt_mask)
        steps = [decoder.next_logits(ids[:, : step - n_steps]) for step in range(n_steps)]
        forced = reader.logits(probe)  # [n * n_steps, vocab]
    stepped = torch.stack(steps, dim=1).flatten(0, 1)

    # `not <=` instead of `>`: NaN is an error too.
    gap = float((stepped.log_softmax(dim=-1) - forced.log_softmax(dim=-1)).abs().max())
    if not gap <= (TOLERANCE_BFLOAT16 if in_bfloat16 else TOLERANCE):
        raise ParityError(
            f"{type(model).__name__} ({name!r}) as a mask model: log-probs of step-by-step decoding differ by "
            f"{gap:.3g} nats from those of one forward pass, so the masks would be wrong. Likely cause: its cache "
            f"needs arguments that are not passed. Try attn_implementation: eager, or report the family"
        )
    return gap


MASK_MODEL_FOLDER = "mask_model"
"""Subfolder of a saved policy that contains its mask model."""


class MaskablePolicy(LMActorCriticPolicy):
    """Mixin of the maskable policies.

    Args:
        observation_space: as in `LMActorCriticPolicy`.
        action_space: as in `LMActorCriticPolicy`.
        lr_schedule: as in `LMActorCriticPolicy`.
        special_token_ids: always allowed; NLPO passes the tokenizer's. Default: the model's own end, pad and begin.
        settings: further arguments of `LMActorCriticPolicy`, and those of `MaskablePolicyArguments`.

    Raises:
        ConfigError: `mask_type` and `top_mask` are incompatible, or rollouts use beam search.
        ModelError: as in `LMActorCriticPolicy`; or a saved mask model does not match the policy.
        ParityError: as in `LMActorCriticPolicy`; or the mask model's step-by-step decoding is wrong.
    """

    arguments_class = MaskablePolicyArguments
    arguments: MaskablePolicyArguments
    generator: MaskedTextGenerator

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *,
        special_token_ids: Sequence[int] | None = None,
        **settings: Any,
    ) -> None:
        self._special_token_ids = special_token_ids
        super().__init__(observation_space, action_space, lr_schedule, **settings)

    def _load(self, use_reference: bool) -> None:
        super()._load(use_reference)

        # The mask model that was saved with the policy, else a copy of it. Without adapters: these are merged into
        # copies of their weights, so that `update_mask_model` can pair the weights.
        self.mask_model: PreTrainedModel | None = None
        self.mask_reader: EpisodeReader | None = None
        if self.arguments.mask_type != "topk":
            self.mask_model = load_mask_model(self.auto_class, self.arguments)
            if self.mask_model is None:
                policy = self.policy_model
                self.mask_model = merged(policy) if has_lora(policy) else copy_sharing_frozen(policy)
            self.mask_model.requires_grad_(False)
            self.mask_reader = self.reader_class(self.mask_model)
        self.generator = _generator(self.policy_model, self.mask_model, self.arguments, self._special_token_ids)

    def _check_parity(self) -> None:
        super()._check_parity()
        if self.mask_reader is not None:
            needs_bfloat16 = "flash" in (self.arguments.attn_implementation or "")
            check_mask_parity(self.mask_reader, self.arguments.model_name, in_bfloat16=needs_bfloat16)

    def _next_token_logits(self, observation: Any) -> Tensor:
        logits = super()._next_token_logits(observation)
        judged = logits if self.mask_reader is None else self.mask_reader.next_token_logits(observation)
        return logits.masked_fill(~self.generator.rule.allowed(judged), -torch.inf)

    def set_training_mode(self, mode: bool) -> None:
        """Set training mode as in `LMActorCriticPolicy`; the mask model is never in training mode."""
        super().set_training_mode(mode)
        if self.mask_model is not None:
            self.mask_model.eval()

    @torch.no_grad()
    def update_mask_model(self) -> None:
        """Update the mask model's weights from the policy's, in place.

        With `mask_ema` d its weights become d * mask + (1 - d) * policy, otherwise a copy of the policy's. Without a
        mask model (`mask_type: topk`) this does nothing.
        """
        if self.mask_model is None:
            return
        policy = merged(self.policy_model) if has_lora(self.policy_model) else self.policy_model
        new_fraction = 1.0 - (self.arguments.mask_ema or 0.0)

        # A frozen weight that both models share is one tensor, with nothing to average.
        for mine, theirs in zip(self.mask_model.parameters(), policy.parameters(), strict=True):
            if mine is theirs:
                continue
            if new_fraction == 1.0:
                mine.copy_(theirs)
            else:
                mine.lerp_(theirs, new_fraction)

        # Buffers are no weights to average: counters, for instance, or tables.
        for buffer, other in zip(self.mask_model.buffers(), policy.buffers(), strict=True):
            buffer.copy_(other)

    def training_state(self) -> dict[str, Tensor]:
        """Return the state of `LMActorCriticPolicy` and the mask model's own weights."""
        state = super().training_state()
        if self.mask_model is None:
            return state

        # Without the frozen weights that it shares with the policy, which never change.
        shared = {parameter.data_ptr() for parameter in self.policy_model.parameters()}
        for name, weight in self.mask_model.named_parameters():
            if weight.data_ptr() not in shared:
                state[f"mask_model.{name}"] = weight.data
        return state

    def save_model(
        self,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> Path:
        """Save as in `LMActorCriticPolicy`, and the mask model in `mask_model/`, from which policies load it."""
        folder = super().save_model(folder, tokenizer, eos_token_ids=eos_token_ids)
        if self.mask_model is not None:
            save_language_model(self.mask_model, folder / MASK_MODEL_FOLDER, checkpoint_dropout=self._saved_dropout)
        return folder

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | {"special_token_ids": self._special_token_ids}


class MaskableCausalLMActorCriticPolicy(MaskablePolicy, CausalLMActorCriticPolicy):
    """Decoder-only policy restricted to the tokens that its mask model allows."""


class MaskableSeq2SeqLMActorCriticPolicy(MaskablePolicy, Seq2SeqLMActorCriticPolicy):
    """Encoder-decoder policy restricted to the tokens that its mask model allows."""


def masked_generator(
    model: PreTrainedModel, arguments: MaskablePolicyArguments, special_token_ids: Sequence[int] | None = None
) -> MaskedTextGenerator:
    """Return a text generator that generates like a maskable policy initialized from `model`.

    Args:
        model: the policy's model; also used as the mask model if none was saved with it.
        arguments: arguments of the policy.
        special_token_ids: always allowed; default: those of the model's config.
    """
    # As at the start of a run, when the mask model is a copy of the policy.
    mask_model = load_mask_model(auto_class_of(model.config), arguments)
    if mask_model is None:
        mask_model = model
    mask_model.to(model.device)  # type: ignore[arg-type]
    return _generator(model, mask_model, arguments, special_token_ids)


def load_mask_model(auto_class: Any, arguments: MaskablePolicyArguments) -> PreTrainedModel | None:
    """Load the mask model that was saved with a model, or return None.

    Raises:
        ModelError: it cannot be loaded.
    """
    folder = with_home(arguments.model_name) / MASK_MODEL_FOLDER
    if not folder.is_dir():
        return None
    model, _ = load_model(
        auto_class,
        str(folder),
        role="mask model",
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
    )
    return model


def own_special_tokens(model: PreTrainedModel) -> list[int]:
    """Return the end, pad and begin token ids of a model's configs."""
    ids: set[int] = set()
    for config in (model.config.get_text_config(), model.generation_config):
        for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
            value = getattr(config, name, None)

            # Families with several end tokens have a list.
            if isinstance(value, list | tuple):
                ids.update(value)
            elif value is not None:
                ids.add(value)
    return sorted(ids)


def _generator(
    model: PreTrainedModel,
    mask_model: PreTrainedModel | None,
    arguments: MaskablePolicyArguments,
    special_token_ids: Sequence[int] | None,
) -> MaskedTextGenerator:
    vocab_size = int(model.config.get_text_config().vocab_size)
    if mask_model is not None and mask_model.config.get_text_config().vocab_size != vocab_size:
        raise ModelError(f"the mask model saved with {arguments.model_name!r} and the policy differ in vocabulary")

    # A tokenizer may have more tokens than the model.
    special = own_special_tokens(model) if special_token_ids is None else special_token_ids
    rule = MaskRule(
        arguments.mask_type,
        arguments.top_mask,
        arguments.min_tokens_to_keep,
        tuple(sorted(id for id in set(special) if id < vocab_size)),
    )
    return MaskedTextGenerator(
        model,
        mask_model if arguments.mask_type != "topk" else None,
        rule,
        generation_kwargs=arguments.generation_kwargs,
        prompt_truncation_side=arguments.prompt_truncation_side,
        bfloat16=arguments.dtype == "bfloat16",
    )
