"""Scoring and generation of episodes whose prompts have pictures.

Both read prompts with the arguments of `core.picture_inputs`. Placeholders of pictures are no possible tokens of
responses: a model that wrote one could not read its own text. The distribution that is scored excludes them as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from rl4lms_like.core.devices import to_device
from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.picture_inputs import continued_inputs, inputs_of_texts, prompt_inputs
from rl4lms_like.core.token_scores import NEVER, Head
from rl4lms_like.policies.generation import TextGenerator
from rl4lms_like.policies.teacher_forcing import CausalReader
from rl4lms_like.system.errors import ModelError


class VisionReader(CausalReader):
    """Scores episodes with a vision-language model.

    Args:
        model: any `AutoModelForImageTextToText` with a decoder-only language model.
        pictures: encoder of its prompts.
        compile: apply `torch.compile` to its trunk.
    """

    def __init__(self, model: PreTrainedModel, pictures: PictureEncoder, *, compile: bool = False) -> None:
        super().__init__(model, compile=compile)
        self.pictures = pictures

    def fresh(self) -> VisionReader:
        return VisionReader(self.model, self.pictures)

    def head(self) -> Head:
        head = super().head()
        bias = head.bias
        if bias is None:
            bias = torch.zeros(len(head.weight), device=head.weight.device)  # [vocab]
        return replace(head, bias=bias.float().index_fill(0, self._placeholders(bias.device), NEVER))

    def scored_logits(self, episodes: EpisodeBatch) -> Tensor:
        logits = self.logits(episodes)
        return logits.index_fill(1, self._placeholders(logits.device), NEVER)

    def scored_logits_of_all_tokens(self, episodes: EpisodeBatch) -> Tensor:
        """Return `logits_of_all_tokens` of the distributions that are scored."""
        logits = self.logits_of_all_tokens(episodes)
        return logits.index_fill(-1, self._placeholders(logits.device), NEVER)

    def _placeholders(self, device: torch.device) -> Tensor:
        return to_device(torch.tensor(self.pictures.placeholder_ids), device)

    def _inputs(self, episodes: EpisodeBatch, *, drop_last: bool) -> dict[str, Tensor]:
        response_ids = episodes.response_ids[:, : -1 if drop_last else None]
        numbers = _numbers_of(episodes).tolist()
        inputs = inputs_of_texts(
            self.model, self.pictures, episodes.prompt_ids, episodes.prompt_mask, response_ids, numbers
        )
        return self._known(inputs)

    def _inputs_of_parts(
        self, episodes: EpisodeBatch, firsts: Tensor, rows: Tensor, *, drop_last: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        # Those of one episode of each prompt.
        ids, mask, numbers = episodes.prompt_ids[firsts], episodes.prompt_mask[firsts], _numbers_of(episodes)
        prompts = prompt_inputs(self.model, self.pictures, ids, mask, numbers[firsts.cpu()].tolist())
        response_ids = episodes.response_ids[:, : -1 if drop_last else None]

        # Positions have the prompts in their last dimension but one: [u, n_response], or [3, u, n_response].
        continued = continued_inputs(self.model, prompts, response_ids.shape[1])
        responses = {name: matrix.index_select(-2, rows) for name, matrix in continued.items()}
        responses["input_ids"] = response_ids
        responses["attention_mask"] = torch.cat([episodes.prompt_mask.long(), torch.ones_like(response_ids)], dim=1)
        return self._known(prompts), self._known(responses)

    def _known(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs without positions, if the model computes them itself."""
        if self._takes_positions:
            return inputs
        return {name: value for name, value in inputs.items() if name != "position_ids"}

    def next_token_logits(self, observation: dict[str, Tensor]) -> Tensor:
        ids = observation["input_encoded_pt"]
        if bool(torch.isin(ids, self._placeholders(ids.device)).any()):
            raise ModelError("a single step (`predict`) cannot see the images of a prompt; use `generate`")
        logits = super().next_token_logits(observation)
        return logits.index_fill(1, self._placeholders(logits.device), NEVER)


def _numbers_of(episodes: EpisodeBatch) -> Tensor:
    """Return the numbers of the pictures of prompts `[n]`, in main memory."""
    numbers = episodes.layout.pictures
    return torch.zeros(episodes.n_episodes, dtype=torch.int64) if numbers is None else numbers


class ExcludedTokens(LogitsProcessor):
    """Logits processor that makes some tokens impossible; unlike that of transformers, entropies stay finite.

    Args:
        ids: the tokens.
        device: device of the scores.
    """

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self.ids = torch.tensor(ids, device=device)  # copied once, not for each token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores `[n, vocab]`, with `NEVER` for these tokens."""
        return scores.index_fill(1, self.ids, NEVER)


class VisionTextGenerator(TextGenerator):
    """Text generator of a vision-language model.

    Args:
        model: any `AutoModelForImageTextToText` with a decoder-only language model.
        pictures: encoder of its prompts.
        options: further arguments of `TextGenerator`.
    """

    has_decode_loop = False
    pictures: PictureEncoder

    def __init__(self, model: PreTrainedModel, pictures: PictureEncoder, **options: Any) -> None:
        super().__init__(model, **options)
        self.pictures = pictures

    def _episodes(
        self,
        ids: Tensor,
        mask: Tensor,
        arguments: Any,
        processors: Sequence[LogitsProcessor] = (),
        *,
        pictures: Tensor | None,
        **options: Any,
    ) -> EpisodeBatch:
        # First of the processors: the temperature, `top_k` ... apply to the tokens that are possible.
        excluded = ExcludedTokens(self.pictures.placeholder_ids, ids.device)
        if pictures is None:
            pictures = torch.zeros(len(ids), dtype=torch.int64)
        pictures = pictures.to(ids.device)
        return super()._episodes(ids, mask, arguments, [excluded, *processors], pictures=pictures, **options)

    def _inputs(self, ids: Tensor, mask: Tensor, pictures: Tensor | None) -> dict[str, Tensor]:
        assert pictures is not None
        return prompt_inputs(self.model, self.pictures, ids, mask.bool(), pictures.tolist())
