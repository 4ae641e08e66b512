"""Vision-language model of the family Idefics3 (SmolVLM) that is small enough to learn the pool `shapes` on one core.

    picture 56 x 56 ─ 8 x 8 patches ─ tower of two layers ─ 4 x 4 image tokens ─ language model of two layers ─> a word

The weights are random: the pool's questions are all that it will ever read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AddedToken,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
)

from rl4lms_like.data_pools.shapes import COLORS, MOST_SHAPES, POSITIONS, QUESTIONS
from rl4lms_like.small_models.warm_start import make_word_tokenizer

SIDE = 56
PATCH = 7
SCALE = 2
"""Patches along the side of the square that becomes one image token."""

_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def make_tiny_vision_model(folder: Path, seed: int = 0) -> None:
    """Save a model with its processor. Torch's global generator is unchanged."""
    # One token for each word of questions and answers; the processor needs the special ones.
    words: dict[str, None] = dict.fromkeys((*COLORS, *map(str, range(1, MOST_SHAPES + 1)), *POSITIONS))
    for question in QUESTIONS.values():
        words |= dict.fromkeys(question.split())
    tokenizer = make_word_tokenizer(list(words))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True, normalized=False) for token in _SPECIAL]}
    )

    n_image_tokens = (SIDE // PATCH // SCALE) ** 2
    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=n_image_tokens)

    image_token_id: Any = tokenizer.convert_tokens_to_ids("<image>")

    # The initial scale of 0.02 is for widths of thousands: with it, the answers would hardly depend on the picture.
    special_ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = Idefics3Config(
        vision_config={
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "image_size": SIDE,
            "patch_size": PATCH,
            "initializer_range": 0.1,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 64,
            "vocab_size": len(tokenizer),
            "initializer_range": 0.1,
            **special_ids,
        },
        scale_factor=SCALE,
        image_token_id=image_token_id,
        **special_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Idefics3ForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
