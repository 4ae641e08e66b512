"""Tiny random vision-language models of several families with their processors, built without a hub.

folder = save_vision_model(path, "idefics3")     what `AutoProcessor` and `AutoModelForImageTextToText` load
vision_config(folder)                            config of a run of RL
given_texts_config("dpo", folder, pool, ...)     config of a run on given texts
plain_inputs(model, encoder, sample, response)   arguments of a plain pass, by the processor alone

The towers have two layers and read pictures of at most 56 x 56 pixels.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from transformers import AddedToken, AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.processors import load_processor, without_video_part
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.data_pools.shapes import COLORS
from rl4lms_like.policies.vision import VisionLMActorCriticPolicy
from rl4lms_like.testing.models import SENTENCES, make_tokenizer

HIDDEN = 64
SIDE = 56
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
ANSWERS = ("red green blue yellow purple black ", "red", "green", "blue", "yellow", "purple", "black") * 8
"""Texts of the tokenizer, for which each of these words is one token."""
MOVE = 0.05
"""Standard deviation of what is added to initial weights, which hardly look at pictures or positions."""
RESPONSE_TYPES = {"paligemma": 1}
"""Type of the tokens of responses, where it is not 0."""

# As in Qwen's template: contents are texts or lists of parts.
TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
TURNS = TEMPLATE.replace(": ", ":\n")
"""The same with each content on a line of its own, so that no token spans its beginning."""


def png(seed: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """A random picture `[width, height]` as the contents of a file."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def pictures(*seeds: int, sizes: tuple[tuple[int, int], ...] = ((56, 56), (112, 84))) -> tuple[Picture, ...]:
    """Random pictures, of these widths and heights."""
    return tuple(Picture(contents=png(seed, size)) for seed, size in zip(seeds, sizes, strict=False))


def _tokenizer(*special: str, **named: str) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with further special tokens, and those of a family under names of their own."""
    tokenizer = make_tokenizer([*SENTENCES, *ANSWERS], vocab_size=360)
    tokens = [AddedToken(token, special=True, normalized=False) for token in (*special, *named.values())]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    if not named:
        return tokenizer
    backend = tokenizer.backend_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<eos>",
        unk_token="<eos>",
        extra_special_tokens=named,
        clean_up_tokenization_spaces=False,
    )


def _text(tokenizer: Any, **others: Any) -> dict[str, Any]:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return {**TEXT, **special, "vocab_size": len(tokenizer), **others}


def _qwen(model_type: str) -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen2VLImageProcessorPil, Qwen2VLProcessor, Qwen3VLProcessor

    tokenizer = _tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    patch = 16 if model_type == "qwen3_vl" else 14
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch}, patch_size=patch
    )
    complete: Any = Qwen3VLProcessor if model_type == "qwen3_vl" else Qwen2VLProcessor
    processor = without_video_part(complete)(images, tokenizer)
    start, end, image, video = tokenizer.convert_tokens_to_ids(
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    )
    rotary = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch, "spatial_merge_size": 2}
    if model_type == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": HIDDEN}
    if model_type == "qwen2_5_vl":
        vision |= {"fullatt_block_indexes": [1], "window_size": 4 * patch}
    if model_type == "qwen3_vl":
        rotary["mrope_interleaved"] = True
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return processor, {
        "text_config": _text(tokenizer, rope_parameters=rotary),
        "vision_config": vision,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }


def _idefics3() -> tuple[Any, dict[str, Any]]:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *rows)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4)
    image = tokenizer.convert_tokens_to_ids("<image>")
    return processor, {
        "text_config": {"model_type": "llama", **_text(tokenizer)},
        "vision_config": {**TOWER, "image_size": SIDE, "patch_size": 14},
        "scale_factor": 2,
        "image_token_id": image,
        "pad_token_id": 0,
    }


def _llava() -> tuple[Any, dict[str, Any]]:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = _tokenizer("<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return processor, {
        "text_config": {"model_type": "llama", **_text(tokenizer)},
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": SIDE, "patch_size": 14},
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _siglip(n_tokens: int) -> Any:
    from transformers import SiglipImageProcessorPil

    images: Any = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    images.image_seq_length = n_tokens
    return images


def _paligemma() -> tuple[Any, dict[str, Any]]:
    from transformers import PaliGemmaProcessor

    tokenizer = _tokenizer("<image>")
    processor = PaliGemmaProcessor(_siglip(16), tokenizer)
    return processor, {
        "text_config": {"model_type": "gemma", **_text(tokenizer)},
        "vision_config": {
            **TOWER,
            "model_type": "siglip_vision_model",
            "image_size": SIDE,
            "patch_size": 14,
            "projection_dim": HIDDEN,
            "vision_use_head": False,
        },
        "projection_dim": HIDDEN,
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": 0,
    }


def _gemma3() -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    tokenizer = _tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4)
    ids = tokenizer.convert_tokens_to_ids(["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
    return processor, {
        "text_config": _text(tokenizer, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "vision_config": {**TOWER, "image_size": SIDE, "patch_size": 14, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "boi_token_index": ids[0],
        "eoi_token_index": ids[1],
        "image_token_index": ids[2],
    }


FAMILIES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "idefics3": _idefics3,
    "qwen2_vl": lambda: _qwen("qwen2_vl"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl"),
    "qwen3_vl": lambda: _qwen("qwen3_vl"),
    "llava": _llava,
    "paligemma": _paligemma,
    "gemma3": _gemma3,
}
"""Model type -> its processor and the arguments of its config."""
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families with positions that depend on the sizes of pictures."""


def make_vision_model(family: str, *, moved: bool = True, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """A random model in float32 with its processor; `moved` from its initial weights, which hardly see anything."""
    processor, arguments = FAMILIES[family]()
    config = AutoConfig.for_model(family, **arguments)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if moved:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(MOVE * torch.randn_like(weight))
    return model.eval(), processor


def save_vision_model(folder: Path, family: str, *, moved: bool = True, seed: int = 0) -> Path:
    """Save a random model with its processor; see `make_vision_model`."""
    model, processor = make_vision_model(family, moved=moved, seed=seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def saved_models(folder: Path) -> Callable[[str], Path]:
    """A function that returns the folder of a tiny model of a family, saved when it is first asked for.

    That of `qwen2_vl` has the chat template `TURNS`.
    """

    @cache
    def model_of(family: str) -> Path:
        model = save_vision_model(folder / family, family)
        if family == "qwen2_vl":
            (model / "chat_template.jinja").write_text(TURNS)
        return model

    return model_of


def picture_encoder(folder: Path, **options: Any) -> PictureEncoder:
    """The encoder of a saved model's prompts."""
    config = AutoConfig.from_pretrained(folder)
    return PictureEncoder(load_processor(str(folder), config), config, **options)


def make_vision_policy(folder: Path, *, use_reference: bool = True, **arguments: Any) -> VisionLMActorCriticPolicy:
    """A policy on a saved model, with a seeded value head."""
    torch.manual_seed(0)
    encoder = arguments.pop("pictures", None) or picture_encoder(folder)
    config: Any = AutoConfig.from_pretrained(folder)
    vocabulary = spaces.Discrete(config.get_text_config().vocab_size)
    arguments = {"generation_kwargs": {"do_sample": True, "top_k": 0}, **arguments}
    return VisionLMActorCriticPolicy(
        spaces.Dict({}),
        vocabulary,
        lambda _: 1e-3,
        pictures=encoder,
        use_reference=use_reference,
        model_name=str(folder),
        **arguments,
    )


def plain_inputs(model: Any, encoder: PictureEncoder, sample: Sample, response: Tensor) -> dict[str, Tensor]:
    """The arguments of a pass over one unpadded row: all that the processor returns, continued by a response `[n]`."""
    if sample.images:
        opened = [picture.open() for picture in sample.images]
        text = sample.prompt_or_input_text.replace("<image>", encoder.place)
        inputs = dict(encoder.processor(text=[text], images=[opened], return_tensors="pt"))
        inputs.pop("labels", None)
    else:
        inputs = dict(encoder.processor.tokenizer([sample.prompt_or_input_text], return_tensors="pt"))
        inputs |= {name: torch.zeros_like(inputs["input_ids"]) for name in encoder.type_rules}

    inputs["input_ids"] = torch.cat([inputs["input_ids"], response[None]], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            types = torch.full_like(response[None], RESPONSE_TYPES.get(model.config.model_type, 0))
            inputs[name] = torch.cat([inputs[name], types], dim=1)
    return inputs


class ColourPool(TextGenPool):
    """Pictures of one colour each, whose name is the reference."""

    @classmethod
    def prepare(
        cls, split: str, n_train: int = 240, n_eval: int = 48, constant: bool = False, side: int = SIDE
    ) -> ColourPool:
        samples = []
        rng = random.Random(split)
        for index in range(n_train if split == "train" else n_eval):
            name = rng.choice(sorted(COLORS))
            shade = tuple(min(max(value + rng.randint(-20, 20), 0), 255) for value in COLORS[name])
            if constant:
                shade = (128, 128, 128)
            picture = Picture(contents=f"P6 {side} {side} 255\n".encode() + bytes(shade) * side**2)
            samples.append(Sample(f"{split}_{index}", "<image>colour?", [name], images=(picture,)))
        return cls(samples)


def vision_config(folder: Path, *, algorithm: str = "grpo", n_iters: int = 2, **pool: Any) -> dict[str, Any]:
    """A run that learns the colours of pictures, one token for each, as plain data."""
    return {
        "tokenizer": {"model_name": str(folder)},
        "reward_fn": {"id": "exact_match"},
        "datapool": {"id": "tests.vision_models:ColourPool", "args": pool},
        "env": {"n_envs": 64, "args": {"max_prompt_length": 48, "max_episode_length": 1}},
        "alg": {
            "id": algorithm,
            "args": {"n_steps": 1, "batch_size": 64, "n_epochs": 1, "learning_rate": 3e-3},
            "kl_div": {"coeff": 0.0},
            "policy": {
                "id": "vision_lm_actor_critic_policy",
                "args": {
                    "model_name": str(folder),
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 1},
                },
            },
        },
        "train_evaluation": {
            "eval_batch_size": 48,
            "n_iters": n_iters,
            "eval_every": 1000,
            "save_every": 1000,
            "metrics": [{"id": "exact_match"}],
        },
    }


def given_texts_config(
    id: str,
    model: Path,
    pool: dict[str, Any],
    *,
    batch_size: int,
    alg: dict[str, Any] | None = None,
    **training_args: Any,
) -> dict[str, Any]:
    """Two epochs of an objective on the rows of a pool, `batch_size` rows in a step, as plain data."""
    name = str(model)
    return {
        "tokenizer": {"model_name": name},
        "datapool": pool,
        "alg": {
            "id": id,
            "model_type": "vision",
            "model_name": name,
            "generation_kwargs": {"do_sample": True, "top_k": 0, "max_new_tokens": 3},
            "training_args": {
                "num_train_epochs": 2,
                "per_device_train_batch_size": batch_size,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                **training_args,
            },
            **(alg or {}),
        },
        "train_evaluation": {"eval_batch_size": 4, "metrics": [{"id": "distinct_n"}]},
        "device": "cpu",
    }
