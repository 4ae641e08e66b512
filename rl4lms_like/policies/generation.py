"""How a policy writes: transformers' `generate`, with nothing implied.

What a checkpoint's own `generation_config` asks for (a temperature, forced tokens, no-repeat rules) is not applied
unless the config says so: sampling is what the YAML names. transformers' own defaults stay, so an unset `top_k` is 50.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

DEFAULT_LENGTH = 20
"""transformers' length when none is given; it counts the decoder's start token of seq2seq models."""


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's generation config has token ids only; outside, it is the checkpoint's."""
    own = model.generation_config
    start = getattr(own, "decoder_start_token_id", None)
    if start is None:
        start = getattr(model.config, "decoder_start_token_id", None)
    model.generation_config = GenerationConfig(
        bos_token_id=getattr(own, "bos_token_id", None),
        pad_token_id=pad_token_id(model.config),
        decoder_start_token_id=start,
    )
    try:
        yield
    finally:
        model.generation_config = own


def pad_token_id(model_config: PretrainedConfig) -> int:
    """An id for places that are masked: the model's pad, else its end of text, else 0."""
    config = model_config.get_text_config()
    for token in (config.pad_token_id, config.eos_token_id):
        if isinstance(token, list | tuple):
            token = token[0]
        if token is not None:
            return int(token)
    return 0


def generate_arguments(
    generation_kwargs: Mapping[str, Any],
    *,
    max_new_tokens: int | None,
    eos_token_ids: Sequence[int],
    is_encoder_decoder: bool,
) -> dict[str, Any]:
    """The keyword arguments of one `generate` call.

    `min_length` keeps RL4LMs' meaning: new tokens for a causal model, decoder tokens including the start token for a
    seq2seq model.

    Args:
        generation_kwargs: from the config.
        max_new_tokens: the environment's limit; the smaller one counts.
        eos_token_ids: tokens that end a response; empty = none does.
        is_encoder_decoder: the model's family.
    """
    arguments = {key: value for key, value in generation_kwargs.items() if key != "post_processing_fn"}
    asked = arguments.pop("max_new_tokens", None)
    max_length = arguments.pop("max_length", None)
    if asked is None:
        length = DEFAULT_LENGTH if max_length is None else max_length
        asked = length - 1 if is_encoder_decoder else length
    arguments["max_new_tokens"] = asked if max_new_tokens is None else min(asked, max_new_tokens)
    min_length = arguments.pop("min_length", None)
    if min_length is not None:
        arguments["min_new_tokens"] = min_length - 1 if is_encoder_decoder else min_length
    if arguments.get("min_new_tokens", 0) > arguments["max_new_tokens"]:
        arguments["min_new_tokens"] = arguments["max_new_tokens"]
    if not arguments.get("min_new_tokens") or not eos_token_ids:
        arguments.pop("min_new_tokens", None)
    arguments["eos_token_id"] = list(eos_token_ids) or None
    return arguments


NOT_SETTABLE = {
    "eos_token_id": "what ends a response is the tokenizer's and the model's end-of-text token, see env.args",
    "num_return_sequences": "one response is written for each prompt",
    **dict.fromkeys(
        ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
        "texts are all that is asked for",
    ),
}
"""Arguments of transformers' `generate` that are the library's to give."""


def unknown_generation_arguments(generation_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Keys that `generate` does not know, that cannot be set here, or not to this -> what to say of them."""
    known = [*GenerationConfig().to_dict(), "post_processing_fn"]
    messages = {}
    for key, value in generation_kwargs.items():
        if key in NOT_SETTABLE:
            messages[key] = f"cannot be set: {NOT_SETTABLE[key]}"
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            messages[key] = f"not an argument of transformers' generate{hint}"
        elif key != "post_processing_fn" and (said := _refusal(key, value)) is not None:
            messages[key] = f"transformers does not take it: {said}"
    return messages


def _refusal(key: str, value: Any) -> str | None:
    """What transformers says of one argument that it does not take; its advice on what goes with what is not asked."""
    adviser = logging.getLogger("transformers.generation.configuration_utils")
    level = adviser.level
    adviser.setLevel(logging.CRITICAL)
    try:
        GenerationConfig(**{key: value})
    except (ValueError, TypeError, AttributeError) as error:
        return str(error).partition("\n")[0]
    finally:
        adviser.setLevel(level)
    return None


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Torch's random numbers from `seed` inside, untouched outside. None leaves them as they are."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
