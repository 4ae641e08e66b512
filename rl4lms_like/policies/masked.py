"""Policies restricted to the tokens that a mask model allows (NLPO, Ramamurthy et al., arXiv 2210.01241).

    policy_model   trained; log-probs and entropy are renormalised over the allowed tokens
    mask_model     older, frozen copy of the policy; determines the allowed tokens at every step

The masks are stored with the episodes (`EpisodeBatch.allowed`), so scoring does not depend on this module. NLPO calls
`update_mask_model` at intervals; other algorithms never update the mask model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ModelError
from rl4lms_like.policies.arguments import MaskablePolicyArguments
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.policies.causal import CausalLMActorCriticPolicy
from rl4lms_like.policies.loading import auto_class_of, load_model
from rl4lms_like.policies.lora import copy_sharing_frozen, has_lora, merged
from rl4lms_like.policies.masking import MaskedTextWriter, MaskRule, check_mask_parity
from rl4lms_like.policies.saving import save_language_model
from rl4lms_like.policies.seq2seq import Seq2SeqLMActorCriticPolicy
from rl4lms_like.policies.teacher_forcing import EpisodeReader

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
    writer: MaskedTextWriter

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
        self.mask_model: PreTrainedModel | None = None
        if self.arguments.mask_type != "topk":
            self.mask_model = load_mask_model(self.auto_class, self.arguments)
            if self.mask_model is None:
                policy = self.policy_model
                self.mask_model = merged(policy) if has_lora(policy) else copy_sharing_frozen(policy)
            self.mask_model.requires_grad_(False)
        self.mask_reader: EpisodeReader | None = None if self.mask_model is None else self.reader_class(self.mask_model)
        self.writer = _writer(self.policy_model, self.mask_model, self.arguments, self._special_token_ids)

    def _check_parity(self) -> None:
        super()._check_parity()
        if self.mask_reader is not None:
            needs_bfloat16 = "flash" in (self.arguments.attn_implementation or "")
            check_mask_parity(self.mask_reader, self.arguments.model_name, in_bfloat16=needs_bfloat16)

    def _next_token_logits(self, observation: Any) -> Tensor:
        logits = super()._next_token_logits(observation)
        judged = logits if self.mask_reader is None else self.mask_reader.next_token_logits(observation)
        return logits.masked_fill(~self.writer.rule.allowed(judged), -torch.inf)

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
        new_share = 1.0 - (self.arguments.mask_ema or 0.0)
        for mine, theirs in zip(self.mask_model.parameters(), policy.parameters(), strict=True):
            if mine is theirs:  # a frozen weight that both models share
                continue
            if new_share == 1.0:
                mine.copy_(theirs)
            else:
                mine.lerp_(theirs, new_share)
        for buffer, other in zip(self.mask_model.buffers(), policy.buffers(), strict=True):
            buffer.copy_(other)

    def training_state(self) -> dict[str, Tensor]:
        """Return the state of `LMActorCriticPolicy` and the mask model's own weights."""
        named = super().training_state()
        if self.mask_model is None:
            return named
        shared = {parameter.data_ptr() for parameter in self.policy_model.parameters()}
        own = {f"mask_model.{name}": each.data for name, each in self.mask_model.named_parameters()}
        return named | {name: weight for name, weight in own.items() if weight.data_ptr() not in shared}

    def save_model(self, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
        """Save as in `LMActorCriticPolicy`, and the mask model in `mask_model/`, from which policies load it."""
        folder = super().save_model(folder, tokenizer)
        if self.mask_model is not None:
            save_language_model(self.mask_model, folder / MASK_MODEL_FOLDER, checkpoint_dropout=self._saved_dropout)
        return folder

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | {"special_token_ids": self._special_token_ids}


class MaskableCausalLMActorCriticPolicy(MaskablePolicy, CausalLMActorCriticPolicy):
    """Decoder-only policy restricted to the tokens that its mask model allows."""


class MaskableSeq2SeqLMActorCriticPolicy(MaskablePolicy, Seq2SeqLMActorCriticPolicy):
    """Encoder-decoder policy restricted to the tokens that its mask model allows."""


def masked_writer(
    model: PreTrainedModel, arguments: MaskablePolicyArguments, special_token_ids: Sequence[int] | None = None
) -> MaskedTextWriter:
    """Return a text generator that generates like a maskable policy initialized from `model`.

    Args:
        model: the policy's model; also used as the mask model if none was saved with it.
        arguments: arguments of the policy.
        special_token_ids: always allowed; default: those of the model's config.
    """
    mask_model = load_mask_model(auto_class_of(model.config), arguments)
    if mask_model is None:
        mask_model = model
    mask_model.to(model.device)  # type: ignore[arg-type]
    return _writer(model, mask_model, arguments, special_token_ids)


def load_mask_model(auto_class: Any, arguments: MaskablePolicyArguments) -> PreTrainedModel | None:
    """Load the mask model that was saved with a model, or return None.

    Args:
        auto_class: transformers' `AutoModelFor...`.
        arguments: arguments of the policy.

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
            ids.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
    return sorted(ids)


def _writer(
    model: PreTrainedModel,
    mask_model: PreTrainedModel | None,
    arguments: MaskablePolicyArguments,
    special_token_ids: Sequence[int] | None,
) -> MaskedTextWriter:
    vocab_size = int(model.config.get_text_config().vocab_size)
    if mask_model is not None and mask_model.config.get_text_config().vocab_size != vocab_size:
        raise ModelError(f"the mask model saved with {arguments.model_name!r} and the policy differ in vocabulary")
    special = own_special_tokens(model) if special_token_ids is None else special_token_ids
    return MaskedTextWriter(
        model,
        mask_model if arguments.mask_type != "topk" else None,
        MaskRule(
            arguments.mask_type,
            arguments.top_mask,
            arguments.min_tokens_to_keep,
            tuple(sorted(id for id in set(special) if id < vocab_size)),  # a tokenizer may have more than the model
        ),
        generation_kwargs=arguments.generation_kwargs,
        prompt_truncation_side=arguments.prompt_truncation_side,
        bfloat16=arguments.dtype == "bfloat16",
    )
