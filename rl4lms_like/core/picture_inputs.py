"""Arguments with which a vision-language model reads prompts: here alone, private methods of transformers are called.

    prompts      input_ids  attention_mask  pixel_values ...  token types  position_ids
    responses                                                 token types  position_ids     continued by the model

Positions and types are those of the model's own `generate`. Families differ in them: Qwen-VL has three positions for
each token, which depend on the sizes of the pictures, and PaliGemma's responses have another type than its prompts.

`token_counts` has the numbers of tokens that a processor makes of pictures, without reading a pixel.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4lms_like.core.devices import to_device

TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of models that tell tokens of pictures, or of the prompt, from the others."""

CONTINUED = ("position_ids", *TYPES)
"""Arguments with a number for each token besides ids and mask."""


class PictureTensors(Protocol):
    """Tensors and types of prompts with pictures (`core.picture_encoder.PictureEncoder`)."""

    @property
    def type_rules(self) -> Mapping[str, bool]:
        """For each type of tokens, whether parts of pictures have the type 1."""

    def tensors(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return what a model sees of some prompts, by the numbers of their pictures."""

    def types(self, name: str, ids: Tensor) -> Tensor:
        """Return the types of prompt tokens, of the shape of `ids`."""


def token_counts(processor: Any, sizes: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return how many tokens a processor makes of each picture, computed from the sizes alone.

    Families count the tokens around a picture or not, so only differences between pictures are comparable.

    Args:
        processor: the processor of a vision-language model.
        sizes: width and height of each picture, in pixels.

    Returns:
        None if the processor does not compute them.

    Raises:
        ValueError: the processor rejects a size.
    """
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if count is None:
        return None

    # LLaVA's processor, for instance, needs settings for it that not all checkpoints have.
    try:
        counts = count(image_sizes=[(height, width) for width, height in sizes]).num_image_tokens
    except (AttributeError, KeyError, TypeError):
        return None
    return None if counts is None else [int(n_tokens) for n_tokens in counts]


def prompt_inputs(
    model: PreTrainedModel, pictures: PictureTensors, ids: Tensor, mask: Tensor, numbers: list[int]
) -> dict[str, Tensor]:
    """Return the keyword arguments for a pass over prompts, or for `generate`.

    Args:
        model: the language model.
        pictures: encoder of its prompts.
        ids: `[n, prompt_len]`, padded on the left.
        mask: `[n, prompt_len]`, bool.
        numbers: of the prompts' pictures, `n` of them; 0 = none.
    """
    # Processors also return what a model does not read.
    accepted = inspect.signature(type(model).forward).parameters
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": mask.long()}
    for name, tensor in pictures.tensors(numbers).items():
        if name in accepted:
            inputs[name] = to_device(tensor, ids.device)

    # Of texts too: without types, some models attend to their tokens in another way.
    for name in pictures.type_rules:
        if name in accepted:
            inputs[name] = pictures.types(name, ids) * mask

    # As `generate` has them; it passes the ids apart from the other arguments.
    without_ids = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    any_model: Any = model
    inputs["position_ids"] = any_model._prepare_position_ids_for_generation(ids, without_ids)
    return inputs


def continued_inputs(model: PreTrainedModel, prompts: dict[str, Tensor], n_tokens: int) -> dict[str, Tensor]:
    """Return positions and types of `n_tokens` tokens after prompts, each `[..., n, n_tokens]`.

    Args:
        model: the language model.
        prompts: returned by `prompt_inputs`.
        n_tokens: number of tokens after each prompt.
    """
    # By one token: for several, transformers would repeat the types of the prompt's last ones.
    of_prompts = {name: prompts[name] for name in CONTINUED if name in prompts}
    any_model: Any = model
    longer = any_model._update_model_kwargs_for_generation(
        {}, dict(of_prompts), is_encoder_decoder=False, num_new_tokens=1
    )

    # From the first token after the prompt, positions increase by one, and types stay the same.
    inputs = {}
    for name in of_prompts:
        first = longer[name][..., -1:]
        if name == "position_ids":
            inputs[name] = first + torch.arange(n_tokens, device=first.device)
        else:
            inputs[name] = first.expand(*first.shape[:-1], n_tokens)
    return inputs


def inputs_of_texts(
    model: PreTrainedModel,
    pictures: PictureTensors,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    response_ids: Tensor,
    numbers: list[int],
) -> dict[str, Tensor]:
    """Return the keyword arguments for a pass over prompts and their responses together.

    Tokens after the end of a response are not masked: they cannot influence earlier positions.

    Args:
        model: the language model.
        pictures: encoder of its prompts.
        prompt_ids: `[n, prompt_len]`, padded on the left.
        prompt_mask: `[n, prompt_len]`, bool.
        response_ids: `[n, response_len]`, padded on the right.
        numbers: of the prompts' pictures, `n` of them; 0 = none.
    """
    inputs = prompt_inputs(model, pictures, prompt_ids, prompt_mask, numbers)

    # Along the last dimension, which is that of the tokens for positions `[3, n, length]`, too.
    responses = continued_inputs(model, inputs, response_ids.shape[1])
    responses |= {"input_ids": response_ids, "attention_mask": torch.ones_like(response_ids)}
    for name, matrix in responses.items():
        inputs[name] = torch.cat([inputs[name], matrix], dim=-1)
    return inputs
