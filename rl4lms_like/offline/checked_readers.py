"""Readers of the language models of runs on given texts, after the checks of a policy.

model ─ probe: linear head?  log-probs = those of generation?  may responses share their prompt? ─> reader
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.policies.generation import seeded
from rl4lms_like.policies.parity import (
    SHARING_TOLERANCE,
    check_packing,
    check_parity,
    check_sharing,
    first_episodes,
    is_flash_attention,
    probe_episodes,
)
from rl4lms_like.policies.teacher_forcing import CausalReader, EpisodeReader, Seq2SeqReader
from rl4lms_like.policies.vision_parity import (
    check_vision_parity,
    possible_tokens,
    probe_episodes_with_pictures,
    vision_sharing_gap,
)
from rl4lms_like.policies.vision_reader import VisionReader


def new_reader(model: PreTrainedModel, pictures: PictureEncoder | None = None) -> EpisodeReader:
    """Return the reader of a language model; `pictures` encodes its prompts, if it reads images."""
    if pictures is not None:
        return VisionReader(model, pictures)
    # An encoder-decoder model reads a prompt apart from its responses, a decoder-only model as one sequence with them.
    return Seq2SeqReader(model) if model.config.is_encoder_decoder else CausalReader(model)


def check_reader(reader: EpisodeReader, name: str, *, packs_rows: bool = False) -> None:
    """Find how log-probs are computed, and check them as a policy does, in place.

    Args:
        reader: of a model in evaluation mode, whose weights may be split.
        name: name of the model, for messages.
        packs_rows: compute packed rows, where that is exact; only of decoder-only models that read texts only.

    Raises:
        ModelError: the model's interface is not supported, or its outputs are not finite.
        ParityError: log-probs differ from those of generation.
    """
    model = reader.model
    if isinstance(reader, VisionReader):
        _check_vision(reader, name)
        return

    vocab_size = int(model.config.get_text_config().vocab_size)
    with first_episodes(model, name):
        probe = probe_episodes(vocab_size, reader.prompt_side)
        reader.probe_head(probe.to(model.device))

        # The log-probs first: whether prompts may be shared is found by comparison with them. With split weights, a
        # prompt that is computed once would be a pass of its own, which the other processes may not need.
        in_bfloat16 = is_flash_attention(model)
        check_parity(reader, name, in_bfloat16=in_bfloat16)
        if reader.network is None:
            reader.shares_prompts = check_sharing(reader, name, in_bfloat16=in_bfloat16)
        if packs_rows:
            reader.packing = check_packing(reader, name, in_bfloat16=in_bfloat16)


def checked_vision_reader(model: PreTrainedModel, name: str, pictures: PictureEncoder) -> VisionReader:
    """Return the reader of a vision-language model, after the checks of a policy; errors as in `check_reader`."""
    reader = VisionReader(model, pictures)
    _check_vision(reader, name)
    return reader


def _check_vision(reader: VisionReader, name: str) -> None:
    """Do what `check_reader` does for a vision-language model."""
    with first_episodes(reader.model, name):
        reader.probe_head(probe_episodes_with_pictures(reader))

        in_bfloat16 = is_flash_attention(reader.model)
        check_vision_parity(reader, name, in_bfloat16=in_bfloat16)
        reader.shares_prompts = check_sharing(reader, name, gap=vision_sharing_gap, in_bfloat16=in_bfloat16)


def checked_reward_reader(model: PreTrainedModel, name: str, pictures: PictureEncoder) -> VisionReader:
    """Return the reader of a reward model of prompts with pictures, after the checks of a policy.

    Its rewards are computed from the states that the checks compare as log-probs; errors as in `check_reader`.
    """
    reader = VisionReader(model, pictures)
    any_model: Any = model
    with first_episodes(model, name):
        # Log-probs and generation need an output layer, and a reward model has none: the check has a random one.
        text_config = any_model.config.get_text_config()
        with seeded(0, model.device):
            output_layer = nn.Linear(int(text_config.hidden_size), int(text_config.vocab_size), bias=False)
        identity = any_model.lm_head
        any_model.lm_head = output_layer.to(model.device)
        try:
            checked_vision_reader(model, name, pictures)
        finally:
            any_model.lm_head = identity

        # Rewards are computed from the states themselves, so these are compared where a prompt is computed once.
        in_bfloat16 = is_flash_attention(model)
        gap = partial(vision_sharing_gap, has_head=False)
        reader.shares_prompts = check_sharing(reader, name, gap=gap, in_bfloat16=in_bfloat16)
    return reader


@torch.no_grad()
def reads_prompts_in_order(reader: VisionReader) -> bool:
    """Return whether a token of a prompt cannot see the later ones; PaliGemma's can.

    Where they can, a model cannot learn to write a token of the prompt: it would see what it has to predict.
    """
    # The same prompts with another last token.
    episodes = probe_episodes_with_pictures(reader)
    one, another, *_ = possible_tokens(reader.model, reader.pictures)
    last = episodes.prompt_ids[:, -1:]
    others = torch.cat([episodes.prompt_ids[:, :-1], torch.where(last == one, another, one)], dim=1)

    # States at all tokens before the last one, [n, prompt_len - 1, d].
    n_before = others.shape[1] - 1
    before = reader.states_of_all_tokens(episodes)[:, :n_before]
    after = reader.states_of_all_tokens(replace(episodes, prompt_ids=others))[:, :n_before]

    # Within rounding, relative to the largest state; padding has no states that count.
    gap = (before - after)[episodes.prompt_mask[:, :n_before]].abs().max()
    return bool(gap <= SHARING_TOLERANCE * max(1.0, float(before.abs().max())))
