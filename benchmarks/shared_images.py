"""CPU time of scoring and training with images computed once for the 8 responses of a group, and once per response.

    python -m benchmarks.shared_images             # Qwen2-VL, Idefics3, LLaVA; five rounds
    python -m benchmarks.shared_images --quick     # one small round, nothing written

    repeated   `prompt_rows` is None: tower and language model read the prompt of each response
    shared     `prompt_rows` is set: both read each prompt once

A rollout has 8 responses of 2 to 16 tokens to each of 8 prompts with an image of 112 x 112 pixels and a question of
eight words. Tower and language model have four layers and are 128 wide; the tower is frozen, as by default. `score`
computes log-probs without gradients, `train` is a forward and a backward pass over all episodes. Both alternate in each
round, and their log-probs and gradients are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

from benchmarks.ppo_iteration import RESULTS, machine
from rl4lms_like.core.episodes import EpisodeBatch, padded
from rl4lms_like.core.observation import NO_LIMIT
from rl4lms_like.core.picture_encoder import PictureEncoder, noise
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.processors import without_video_part
from rl4lms_like.core.sample import Sample
from rl4lms_like.policies.vision_parity import probe_episodes_with_pictures
from rl4lms_like.policies.vision_parts import freeze_vision
from rl4lms_like.policies.vision_reader import VisionReader
from rl4lms_like.testing import models

SIDE, PATCH = 112, 14
N_PROMPTS, GROUP_SIZE, SHORTEST, LONGEST, N_WORDS = 8, 8, 2, 16, 8
VOCABULARY = 512


def tokenizer_with(*special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are numbers, with the special tokens of a family."""
    tokenizer = models.make_word_tokenizer(str(number) for number in range(VOCABULARY - 3))
    tokens = [AddedToken(token, special=True, normalized=False) for token in special]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def text_config(tokenizer: PreTrainedTokenizerFast, width: int, layers: int, **others: Any) -> dict[str, Any]:
    """Return the config of a language model."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        **others,
    }


def tower_config(width: int, layers: int, **others: Any) -> dict[str, Any]:
    """Return the config of a tower."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
        **others,
    }


def qwen2_vl(width: int, layers: int) -> tuple[Any, dict[str, Any]]:
    """Return processor and config of a Qwen2-VL: 16 tokens for an image."""
    special = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = tokenizer_with(*special)
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    complete: Any = Qwen2VLProcessor
    processor = without_video_part(complete)(Qwen2VLImageProcessorPil(size=size, patch_size=PATCH), tokenizer)
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in special)

    # Three positions for each token divide the pairs of a head's dimensions, of which there are `width / 4 / 2`.
    third = width // 24
    sections = [width // 8 - 2 * third, third, third]
    rotary = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
    tower = {"depth": layers, "num_heads": 4, "patch_size": PATCH, "embed_dim": width, "hidden_size": width}
    return processor, {
        "text_config": text_config(tokenizer, width, layers, rope_parameters=rotary),
        "vision_config": {**tower, "spatial_merge_size": 2, "mlp_ratio": 2},
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }


def idefics3(width: int, layers: int) -> tuple[Any, dict[str, Any]]:
    """Return processor and config of an Idefics3: 16 tokens for an image."""
    tokenizer = tokenizer_with("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=(SIDE // PATCH // 2) ** 2)
    return processor, {
        "text_config": text_config(tokenizer, width, layers, model_type="llama"),
        "vision_config": tower_config(width, layers),
        "scale_factor": 2,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "pad_token_id": 0,
    }


def llava(width: int, layers: int) -> tuple[Any, dict[str, Any]]:
    """Return processor and config of a LLaVA: 64 tokens for an image."""
    tokenizer = tokenizer_with("<image>")
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return processor, {
        "text_config": text_config(tokenizer, width, layers, model_type="llama"),
        "vision_config": tower_config(width, layers, model_type="clip_vision_model"),
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


FAMILIES: dict[str, Callable[[int, int], tuple[Any, dict[str, Any]]]] = {
    "qwen2_vl": qwen2_vl,
    "idefics3": idefics3,
    "llava": llava,
}


def make_reader(family: str, width: int, layers: int) -> VisionReader:
    """Return the reader of a random model with a frozen tower."""
    processor, arguments = FAMILIES[family](width, layers)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **arguments)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    freeze_vision(model, "none")
    reader = VisionReader(model, PictureEncoder(processor, model.config))
    reader.probe_head(probe_episodes_with_pictures(reader))
    reader.shares_prompts = True
    return reader


def rollout(reader: VisionReader, seed: int) -> EpisodeBatch:
    """Return random responses to prompts with an image each."""
    generator = torch.Generator().manual_seed(seed)
    prompts, numbers = [], []
    for index in range(N_PROMPTS):
        words = torch.randint(0, VOCABULARY - 3, (N_WORDS,), generator=generator).tolist()
        picture = Picture(contents=noise(SIDE, SIDE, seed=N_PROMPTS * seed + index))
        sample = Sample(str(index), "<image> " + " ".join(map(str, words)), images=(picture,))
        prompts.append(reader.pictures.encode(sample, NO_LIMIT).tolist())
        numbers.append(reader.pictures.number(sample))

    rows = torch.arange(N_PROMPTS).repeat_interleave(GROUP_SIZE)
    ids, mask = padded(prompts, side="left")
    lengths = torch.randint(SHORTEST, LONGEST + 1, (len(rows), 1), generator=generator)
    return EpisodeBatch(
        ids[rows],
        mask[rows],
        torch.randint(3, VOCABULARY, (len(rows), LONGEST), generator=generator),
        torch.arange(LONGEST) < lengths,
        torch.ones(len(rows)).bool(),
        prompt_rows=rows,
        pictures=torch.tensor(numbers)[rows],
    ).trimmed()


def measure(reader: VisionReader, episodes: EpisodeBatch) -> dict[str, Any]:
    """Return CPU seconds of scoring and of a step of training, with log-probs and gradient."""
    start = time.process_time()
    with torch.no_grad():
        log_prob = reader.scores(episodes, logits_budget=10**9).log_prob
    scored = time.process_time()
    reader.model.zero_grad()
    prepared = time.process_time()
    scores = reader.scores(episodes, logits_budget=10**9)
    (torch.linspace(-1, 1, len(log_prob)) * scores.log_prob).mean().backward()
    end = time.process_time()
    gradients = [weight.grad.flatten() for weight in reader.model.parameters() if weight.grad is not None]
    return {
        "score_s": scored - start,
        "train_s": end - prepared,
        "log_prob": log_prob,
        "gradient": torch.cat(gradients),
    }


def compare(family: str, rounds: int, width: int, layers: int) -> dict[str, Any]:
    """Return medians of the CPU seconds, their ratios, and the largest differences of log-probs and gradients."""
    reader = make_reader(family, width, layers)
    measured = []
    for number in range(rounds + 1):
        episodes = rollout(reader, seed=number)  # with all tensors of its images, which are kept
        repeated = measure(reader, replace(episodes, prompt_rows=None))
        measured.append((repeated, measure(reader, episodes)))

    row: dict[str, Any] = {"family": family, "prompt_tokens": episodes.prompt_ids.shape[1]}
    row["log_prob_difference"] = max(float((a["log_prob"] - b["log_prob"]).abs().max()) for a, b in measured)
    gaps = [float((a["gradient"] - b["gradient"]).norm() / b["gradient"].norm()) for a, b in measured]
    row["gradient_difference"] = max(gaps)

    # The first round warms up.
    for part in ("score", "train", "both"):
        keys = ("score_s", "train_s") if part == "both" else (f"{part}_s",)
        seconds = [tuple(sum(way[key] for key in keys) for way in ways) for ways in measured[1:]]
        row[f"{part}_repeated_s"] = statistics.median(repeated for repeated, _ in seconds)
        row[f"{part}_shared_s"] = statistics.median(shared for _, shared in seconds)
        ratios = [repeated / shared for repeated, shared in seconds]
        row[f"{part}_ratio"], row[f"{part}_range"] = statistics.median(ratios), [min(ratios), max(ratios)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round with tiny models, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds, width, layers = (1, 96, 1) if arguments.quick else (arguments.rounds, 128, 4)
    table = Table("model", "prompt", "score", "train", "both", "log-probs differ by")
    rows = []
    for family in FAMILIES:
        row = compare(family, rounds, width, layers)
        ratios = [f"{row[f'{part}_ratio']:.2f}" for part in ("score", "train", "both")]
        table.add_row(family, str(row["prompt_tokens"]), *ratios, f"{row['log_prob_difference']:.1e}")
        rows.append(row)
    Console(width=100).print(table)
    if not arguments.quick:
        settings = {"rounds": rounds, "group_size": GROUP_SIZE, "prompts": N_PROMPTS, "width": width, "layers": layers}
        results = {"date": date.today().isoformat(), "machine": machine(), "settings": settings, "rows": rows}
        (RESULTS / "shared_images.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
