"""Lengths of prompts with pictures, computed from their sizes, are those of the ids that the processor makes."""

from __future__ import annotations

import pytest

from rl4lms_like.core import picture_encoder
from rl4lms_like.core.observation import NO_LIMIT
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.system.errors import DataPoolError
from tests.vision_models import FAMILIES, make_vision_model, png

SIZES = ((56, 56), (1, 1), (7, 30), (97, 31), (100, 100), (113, 199), (300, 20), (20, 300), (640, 480), (333, 1001))
"""Widths and heights."""


@pytest.fixture(scope="module", params=[*FAMILIES, "idefics3 in tiles"])
def encoder(request):
    model, processor = make_vision_model(request.param.split()[0])
    if request.param.endswith("tiles"):
        processor.image_processor.do_image_splitting = True
        processor.image_processor.size = {"longest_edge": 4 * 56}
    return PictureEncoder(processor, model.config)


def sample_of(*sizes, text="see ", rendered=None):
    images = tuple(Picture(contents=png(seed, size)) for seed, size in enumerate(sizes))
    return Sample("s", text, images=images, rendered_prompt=rendered)


def n_ids(encoder, sample, max_pixels=None):
    """Number of ids that the processor makes of a prompt and its pixels."""
    opened = []
    for picture in sample.images:
        image = picture.open()
        if max_pixels is not None and image.width * image.height > max_pixels:
            factor = (max_pixels / (image.width * image.height)) ** 0.5
            image = image.resize((max(int(image.width * factor), 1), max(int(image.height * factor), 1)))
        opened.append(image)
    text = sample.rendered_prompt
    if text is None:
        text = sample.prompt_or_input_text.replace("<image>", encoder.place)
    is_plain = sample.rendered_prompt is None
    return len(encoder.processor(text=[text], images=[opened], add_special_tokens=is_plain)["input_ids"][0])


@pytest.mark.parametrize("size", SIZES)
def test_a_length_is_that_of_the_ids_whatever_the_size_of_the_picture(encoder, size):
    for text in ("<image>", "see <image>?", "a\n\n<image>\n\nb"):
        sample = sample_of(size, text=text)
        assert encoder.length(sample) == n_ids(encoder, sample)
    rendered = sample_of(size, rendered=f" \n{encoder.place}\nWhy?")
    assert encoder.length(rendered) == n_ids(encoder, rendered)


def test_pictures_of_several_sizes_are_added(encoder):
    sample = sample_of((56, 56), (97, 31), (640, 480), text="<image> or <image>, or <image>?")
    assert encoder.length(sample) == n_ids(encoder, sample)
    sample = sample_of((640, 480), (20, 300), text="<image> or <image>?")
    assert encoder.length(sample) == n_ids(encoder, sample)


def test_lengths_are_those_of_pictures_within_max_pixels(encoder):
    encoder.max_pixels = 2500
    try:
        encoder._counts.clear()
        for size in SIZES:
            sample = sample_of(size, text="see <image>?")
            assert encoder.length(sample) == n_ids(encoder, sample, max_pixels=2500)
    finally:
        encoder.max_pixels = None


def samples_of_sizes():
    return [sample_of(size, text=f"see <image>{index}") for index, size in enumerate(SIZES)]


@pytest.fixture
def qwen():
    """An encoder that counts the pictures of which tensors are made."""
    model, processor = make_vision_model("qwen2_vl")
    encoder = PictureEncoder(processor, model.config)
    read = []
    opened = encoder.opened
    encoder.opened = lambda picture: (read.append(picture), opened(picture))[1]
    return encoder, read


def test_a_run_makes_the_tensors_of_one_prompt_when_it_starts(qwen):
    encoder, read = qwen
    samples = [*samples_of_sizes(), *samples_of_sizes(), Sample("text", "Why?")]
    encoder.register(samples, 1000)
    longest = max(samples[:-1], key=lambda sample: n_ids(encoder, sample))
    assert [picture.number for picture in read] == [longest.images[0].number]

    # The pictures of all others are found by their numbers.
    assert encoder.tensors([encoder.number(sample) for sample in samples[:3]])


def test_prompts_that_are_too_long_are_named_as_if_they_were_encoded(qwen):
    encoder, _ = qwen
    samples = samples_of_sizes()
    lengths = [n_ids(encoder, sample) for sample in samples]
    limit = sorted(lengths)[-3]
    with pytest.raises(DataPoolError) as error:
        encoder.register(samples, limit)
    message = str(error.value)
    assert message.count("cannot be truncated") == sum(length > limit for length in lengths)
    for length in lengths:
        assert (f"has {length} tokens" in message) == (length > limit)


@pytest.mark.parametrize("counts", [None, "wrong"])
def test_a_processor_that_counts_wrong_or_not_at_all_encodes_each_prompt(qwen, counts, monkeypatch):
    encoder, read = qwen
    original = picture_encoder.token_counts

    def wrong(processor, sizes):
        return [n + (size != (56, 56)) for n, size in zip(original(processor, sizes), sizes, strict=True)]

    monkeypatch.setattr(picture_encoder, "token_counts", wrong if counts else lambda processor, sizes: None)
    encoder.register(samples_of_sizes(), NO_LIMIT)
    assert len(read) == len(SIZES)


def test_a_picture_whose_pixels_are_damaged_is_found_when_a_run_starts(qwen):
    encoder, _ = qwen
    broken = Sample("broken", "see <image>", images=(Picture(contents=png(1, (300, 300))[:5000]),))
    with pytest.raises(DataPoolError, match="damaged"):
        encoder.register([*samples_of_sizes(), broken], 1000)
