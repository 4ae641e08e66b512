"""Reward models that read prompts with pictures: vision-language models with a linear layer for the reward.

    config.json    reward_images: {max_pixels: null}       marks such a model; how its pictures are read
    weights        those of the model without its output layer, and `score.weight` [1, d]

transformers has no class for them: the layer `score` takes the place of the output layer, and reads the hidden state
after the last token of a text.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PretrainedConfig

from rl4lms_like.core.episodes import padded
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.picture_inputs import inputs_of_texts


class AutoVisionRewardModel:
    """Loads the reward models of all vision-language families, with the interface of transformers' Auto classes."""

    @staticmethod
    def from_pretrained(checkpoint: str, *, config: PretrainedConfig | None = None, **options: Any) -> Any:
        """Load a reward model, or a language model without its output layer; `score` is then new."""
        if config is None:
            config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        return _reward_class(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]).from_pretrained(
            checkpoint, config=config, **options
        )

    @staticmethod
    def from_config(config: PretrainedConfig, **options: Any) -> Any:
        """Return a reward model with random weights."""
        return _reward_class(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])._from_config(config, **options)


@cache
def _reward_class(language_model: Any) -> Any:
    """Return the class of the reward models of a family, a subclass of that of its language models."""

    def init(self: Any, config: Any) -> None:
        language_model.__init__(self, config)
        self.lm_head = nn.Identity()
        self.score = nn.Linear(int(config.get_text_config().hidden_size), 1, bias=False)

    # No weight is tied to the output layer, which is gone. With the name of the class, by which transformers finds how
    # to convert the names of weights in checkpoints.
    body = {"__init__": init, "_tied_weights_keys": {}, "__module__": language_model.__module__}
    return type(language_model.__name__, (language_model,), body)


@torch.no_grad()
def rewards_of_rows(
    model: Any,
    pictures: PictureEncoder,
    prompts: list[list[int]],
    responses: list[list[int]],
    numbers: list[int],
) -> Tensor:
    """Return the rewards `[n]` of texts, float32 on the CPU.

    Args:
        model: reward model.
        pictures: encoder of its prompts.
        prompts: ids of `n` prompts, with placeholders of pictures.
        responses: ids of their responses, at least one each.
        numbers: of the prompts' pictures; 0 = none.
    """
    prompt_ids, prompt_mask = padded(prompts, side="left")  # [n, prompt_len]
    response_ids, response_mask = padded(responses)  # [n, response_len]
    device = model.device
    inputs = inputs_of_texts(
        model, pictures, prompt_ids.to(device), prompt_mask.to(device), response_ids.to(device), numbers
    )

    # The pixels in the precision of the weights.
    accepted = inspect.signature(model.base_model.forward).parameters
    known = {}
    for name, value in inputs.items():
        if name in accepted or name != "position_ids":
            known[name] = value.to(model.dtype) if value.is_floating_point() else value
    states = model.base_model(**known, use_cache=False).last_hidden_state  # [n, prompt_len + response_len, d]

    # The state after the last token of each text.
    last = prompt_ids.shape[1] + response_mask.sum(dim=1) - 1
    rows = torch.arange(len(prompts), device=device)
    return model.score(states[rows, last.to(device)])[:, 0].float().cpu()
