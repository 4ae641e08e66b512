"""Check at construction of a vision policy: the trained log-probs are those of the model's own use of pictures.

A check whose arguments come from the same functions as the policy's would be blind to errors in them. Here they come
from the processor: the reference is `generate` on one unpadded row with all that the processor returns, and nothing
else. It is compared with episodes in one padded batch, without a picture, with one and with two of different sizes.

An untrained model hardly looks at pictures, and some do not at all, since their projector is 0 at first. Its weights
are therefore moved for a second check, and restored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl4lms_like.core.episodes import EpisodeBatch, padded
from rl4lms_like.core.picture_encoder import PictureEncoder, noise
from rl4lms_like.core.pictures import PLACE, Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.token_scores import NEVER
from rl4lms_like.policies.generation import pad_token_id, plain_generation, seeded
from rl4lms_like.policies.parity import RESPONSE_LENGTH, check_parity, log_probs_of, shared_scoring_gap
from rl4lms_like.policies.vision_reader import VisionReader, VisionTextGenerator

SIZES = ((56, 56), (112, 84), (56, 84))
"""Width and height of the probe's pictures: the first prompt with pictures has one, the second two."""

SENSITIVE = 0.3
"""Nats. If other pictures change log-probs by less, the model is taken for an untrained one."""
STEP = 0.4
"""Weights of an untrained model are moved by random numbers with the standard deviation STEP / sqrt(inputs)."""


def probe_samples(seed: int = 0) -> list[Sample]:
    """Return prompts with no, one and two pictures; another seed gives other pictures of the same sizes."""
    first, *others = (Picture(contents=noise(*size, seed=seed + index)) for index, size in enumerate(SIZES))
    return [
        Sample("text", "1 A b c"),
        Sample("one picture", f"{PLACE} 2 d", images=(first,)),
        Sample("two pictures", f"{PLACE} 3 e {PLACE} f", images=tuple(others)),
    ]


def check_vision_parity(
    reader: VisionReader, name: str, *, in_bfloat16: bool = False, never_written: Collection[int] = ()
) -> None:
    """Check log-probs of episodes with pictures, once more with moved weights if the model is untrained.

    Args:
        reader: reader of a model in evaluation mode, after `probe_head`.
        name: name of the model in messages.
        in_bfloat16: check under bfloat16 autocast.
        never_written: tokens that cannot occur in responses.

    Raises:
        ModelError: log-probs are not finite.
        ParityError: a gap exceeds the tolerance.
    """
    check = partial(_check, reader, name, in_bfloat16=in_bfloat16, never_written=never_written)
    check()
    if reader.network is None and sensitivity(reader) < SENSITIVE:
        with moved_weights(reader.model):
            check()


def _check(reader: VisionReader, name: str, *, in_bfloat16: bool, never_written: Collection[int]) -> None:
    check_parity(
        reader,
        name,
        in_bfloat16=in_bfloat16,
        never_written={*never_written, *reader.pictures.placeholder_ids},
        probe=probe_episodes_with_pictures(reader),
        generated_gap=partial(processor_gap, reader),
    )


def probe_episodes_with_pictures(
    reader: VisionReader, samples: Sequence[Sample] | None = None, response_ids: Tensor | None = None
) -> EpisodeBatch:
    """Return episodes of `probe_samples` with random responses, on the model's device.

    Args:
        reader: encodes the prompts.
        samples: other prompts.
        response_ids: `[n, response_len]`, other responses.
    """
    encoder = reader.pictures
    samples = samples or probe_samples()
    ids, mask = padded([prompt_ids(encoder, sample) for sample in samples], side="left")
    if response_ids is None:
        possible = torch.tensor(possible_tokens(reader.model, encoder))
        generator = torch.Generator().manual_seed(0)
        index = torch.randint(len(possible), (len(samples), RESPONSE_LENGTH), generator=generator)
        response_ids = possible[index]

    is_token = torch.ones_like(response_ids).bool()
    numbers = torch.tensor([encoder.number(sample) for sample in samples])
    episodes = EpisodeBatch(
        ids, mask, response_ids.cpu(), is_token.cpu(), is_token[:, 0].cpu(), prompt_side="left", pictures=numbers
    )
    return episodes.to(reader.device)


def prompt_ids(encoder: PictureEncoder, sample: Sample) -> list[int]:
    """Return the ids of a probe's prompt, of any length."""
    if sample.images:
        return [int(id) for id in encoder.encode(sample, 2**31)]
    return list(encoder.processor.tokenizer(sample.prompt_or_input_text)["input_ids"])


def possible_tokens(model: PreTrainedModel, encoder: PictureEncoder) -> list[int]:
    """Return the tokens that responses can have."""
    n_tokens = int(model.config.get_text_config().vocab_size)
    excluded = set(encoder.placeholder_ids)
    return [id for id in range(n_tokens) if id not in excluded]


@torch.no_grad()
def processor_gap(reader: VisionReader, *, with_pad: bool) -> float:
    """Return the largest difference between teacher-forced log-probs and those of `generate`, in nats.

    Args:
        reader: reads all episodes of the probe in one batch.
        with_pad: force a pad token as the first token of each response.
    """
    model: Any = reader.model
    encoder = reader.pictures
    any_token = possible_tokens(model, encoder)
    pad = [pad_token_id(model.config)]
    samples = probe_samples()
    responses = []
    expected = []
    for sample in samples:
        inputs = processor_inputs(encoder, sample).to(model.device)
        start = inputs["input_ids"].shape[1]

        def allowed(_: int, ids: Tensor, start: int = start) -> list[int]:
            return pad if with_pad and len(ids) == start else any_token

        with plain_generation(model), seeded(0, model.device):
            output = model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                max_new_tokens=RESPONSE_LENGTH,
                eos_token_id=None,
                prefix_allowed_tokens_fn=allowed,
                output_logits=True,
                return_dict_in_generate=True,
            )
        response = output.sequences[0, start:]  # [response_len]
        logits = torch.cat(output.logits).float()  # those before all processing by `generate`, [response_len, vocab]
        logits[:, encoder.placeholder_ids] = NEVER
        responses.append(response)
        expected.append(logits.log_softmax(dim=-1).gather(1, response[:, None]).squeeze(1))

    episodes = probe_episodes_with_pictures(reader, samples, torch.stack(responses))
    return float((log_probs_of(reader, episodes) - torch.stack(expected)).abs().max())


def processor_inputs(encoder: PictureEncoder, sample: Sample) -> Any:
    """Return all that the model's processor returns for a prompt: what users give to `generate`."""
    processor = encoder.processor
    text = sample.prompt_or_input_text.replace(PLACE, encoder.place)
    if sample.images:
        images = [encoder.opened(picture) for picture in sample.images]  # at most `max_pixels`, as in all prompts
        inputs = processor(text=[text], images=[images], return_tensors="pt")
        inputs.pop("labels", None)
        return inputs

    # Some processors refuse texts without pictures. Their types are then those of a prompt with pictures.
    inputs = processor.tokenizer([text], return_tensors="pt")
    for name in encoder.type_rules:
        inputs[name] = torch.zeros_like(inputs["input_ids"])
    return inputs


@torch.no_grad()
def sensitivity(reader: VisionReader) -> float:
    """Return the largest change of the probe's log-probs with other pictures of the same sizes, in nats."""
    episodes = probe_episodes_with_pictures(reader)
    others = probe_episodes_with_pictures(reader, probe_samples(seed=100), episodes.response_ids)
    return float((log_probs_of(reader, episodes) - log_probs_of(reader, others)).abs().max())


@contextmanager
def moved_weights(model: PreTrainedModel) -> Iterator[None]:
    """Add random numbers to all weights of a model within the block; afterwards they are the same to the bit."""
    generator = torch.Generator().manual_seed(0)
    before = {weight: weight.detach().clone() for weight in model.parameters()}
    try:
        with torch.no_grad():
            for weight in before:
                n_inputs = weight[0].numel() if weight.ndim > 1 else 64
                moves = torch.randn(weight.shape, generator=generator) * (STEP / math.sqrt(n_inputs))
                weight.add_(moves.to(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, value in before.items():
                weight.copy_(value)


@torch.no_grad()
def vision_sharing_gap(reader: VisionReader, *, has_head: bool = True) -> float:
    """Return what `parity.sharing_gap` returns, for prompts with pictures.

    Two of the prompts have the same text and different pictures.
    """
    one = probe_samples()[1]
    samples = [*probe_samples(), replace(one, images=probe_samples(seed=100)[1].images)]
    rows = torch.tensor([1, 3, 2, 0, 1, 3, 2, 1])
    episodes = probe_episodes_with_pictures(reader, [samples[row] for row in rows.tolist()])
    episodes = replace(episodes, prompt_rows=rows.to(reader.device))
    gap, _ = shared_scoring_gap(reader, episodes, has_head=has_head)
    if not has_head:
        return gap

    # The policy's own generator, with shared prompts, against the reader.
    generator = VisionTextGenerator(reader.model, reader.pictures, generation_kwargs={"do_sample": True, "top_k": 0})
    generated = generator.generate(
        episodes.prompt_ids,
        episodes.prompt_mask,
        eos_token_ids=(),
        max_new_tokens=RESPONSE_LENGTH,
        seed=0,
        record_log_prob=True,
        pictures=episodes.pictures,
    )
    fresh = reader.fresh()
    fresh.head_scale = reader.head_scale
    log_prob = generated.flat(log_probs_of(fresh, generated))
    assert generated.behavior_log_prob is not None
    return max(gap, float((log_prob - generated.behavior_log_prob).abs().max()))
