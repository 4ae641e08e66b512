"""Generation of episodes with a language model.

    prompts [n, prompt_len] ─ generate ─> EpisodeBatch: up to and including each response's first end token

Used for rollouts and for all evaluations, of policies and of plain models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from rl4lms_like.core.episodes import EpisodeBatch, response_mask_until_end
from rl4lms_like.core.errors import ModelError
from rl4lms_like.policies.generation import generate_arguments, plain_generation, seeded
from rl4lms_like.policies.teacher_forcing import aligned

NO_PROMPT = (
    "a prompt has no tokens, but a decoder-only model needs at least one: use the model's begin or end token as the "
    "prompt, for instance <|endoftext|> for GPT-2"
)
"""Error for an empty prompt: the model would continue from padding, at a position that differs between families."""


class TextWriter:
    """Text generator of a language model; dropout is off during generation.

    Args:
        model: any `AutoModelForCausalLM` or `AutoModelForSeq2SeqLM`.
        generation_kwargs: default arguments of transformers' `generate`.
        prompt_truncation_side: side on which long prompts are truncated.
        bfloat16: compute under bfloat16 autocast.
    """

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

    @property
    def is_encoder_decoder(self) -> bool:
        """True for seq2seq models."""
        return bool(self.model.config.is_encoder_decoder)

    @property
    def prompt_side(self) -> Literal["left", "right"]:
        """Side on which prompts are padded."""
        return "right" if self.is_encoder_decoder else "left"

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
    ) -> EpisodeBatch:
        """Generate one response per prompt.

        Args:
            prompt_ids: `[n, prompt_len]`, padded on either side.
            prompt_mask: `[n, prompt_len]`, True or 1 on real tokens.
            eos_token_ids: tokens that end a response; if empty, all responses reach the length limit.
            max_new_tokens: the environment's limit.
            generation_kwargs: arguments of `generate`; default: those of the constructor.
            seed: seed of the sampling; None uses torch's global generator.

        Returns:
            The finished episodes, on the model's device.

        Raises:
            ModelError: the model's probabilities are invalid; a prompt of a decoder-only model has no tokens; or
                transformers rejects the arguments.
        """
        device = self.model.device
        ids, mask = aligned(prompt_ids.to(device), prompt_mask.bool().to(device), self.prompt_side)
        if not self.is_encoder_decoder and not bool(mask.any(dim=1).all()):
            raise ModelError(NO_PROMPT)
        arguments = generate_arguments(
            self.generation_kwargs if generation_kwargs is None else generation_kwargs,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            is_encoder_decoder=self.is_encoder_decoder,
        )
        return self._episodes(ids, mask, arguments, eos_token_ids, seed).trimmed()

    def _episodes(
        self,
        ids: Tensor,
        mask: Tensor,
        arguments: Mapping[str, Any],
        eos_token_ids: Sequence[int],
        seed: int | None,
        processors: LogitsProcessorList | None = None,
    ) -> EpisodeBatch:
        """Return the generated episodes, each cut after the response's first end token."""
        sequences = self._sequences(ids, mask, arguments, seed, processors)
        response_ids = sequences[:, 1 if self.is_encoder_decoder else ids.shape[1] :]
        response_mask, terminated = response_mask_until_end(response_ids, eos_token_ids)
        return EpisodeBatch(ids, mask, response_ids, response_mask, terminated, prompt_side=self.prompt_side)

    def _sequences(
        self,
        ids: Tensor,
        mask: Tensor,
        arguments: Mapping[str, Any],
        seed: int | None,
        processors: LogitsProcessorList | None,
    ) -> Tensor:
        """Return the output ids of `generate`, including prompt or start token."""
        model: Any = self.model
        was_training = model.training
        model.eval()
        try:
            with plain_generation(model), seeded(seed, model.device), self._autocast():
                sequences: Tensor = model.generate(
                    input_ids=ids, attention_mask=mask.long(), logits_processor=processors, **arguments
                )
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):
                raise
            raise ModelError(f"the policy has diverged: its token probabilities are invalid ({error})") from error
        except (ValueError, TypeError) as error:
            raise ModelError(f"transformers' generate rejects the generation_kwargs: {error}") from error
        finally:
            model.train(was_training)
        return sequences

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.bfloat16:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16)
