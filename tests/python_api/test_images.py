"""Prompts with images given in Python: images of PIL, data sets, samples and paths become files of the cache."""

from __future__ import annotations

import io

import datasets
import numpy as np
import pytest
from PIL import Image

from rl4lms_like import Run
from rl4lms_like.core.pictures import Picture
from rl4lms_like.core.sample import Sample
from rl4lms_like.data_pools.shapes import Shapes
from rl4lms_like.system.errors import ConfigError
from rl4lms_like.training.inputs import build_datapools
from tests.config_errors import raises_at

SEEDS = (0, 1, 2)
QUESTION = "What is it?"


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8))


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    noise(seed).save(stream, "PNG")
    return stream.getvalue()


def of_dataset(_):
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    columns = {"prompt": [QUESTION] * 3, "image": [{"bytes": png(seed), "path": None} for seed in SEEDS]}
    return datasets.Dataset.from_dict(columns, features=features)


def of_samples(_):
    return [Sample("", f"<image>{QUESTION}", images=(Picture.of(noise(seed)),)) for seed in SEEDS]


def of_files(folder):
    for seed in SEEDS:
        (folder / f"{seed}.png").write_bytes(png(seed))
    return [{"prompt": QUESTION, "image": f"{seed}.png"} for seed in SEEDS]


FORMS = {
    "images of PIL": lambda _: [{"prompt": QUESTION, "image": noise(seed)} for seed in SEEDS],
    "lists of them": lambda _: [{"prompt": QUESTION, "images": [noise(seed)]} for seed in SEEDS],
    "pictures": lambda _: [{"prompt": QUESTION, "image": Picture.of(png(seed))} for seed in SEEDS],
    "a data set": of_dataset,
    "samples": of_samples,
    "paths": of_files,
}


def length(responses):
    return [float(len(response)) for response in responses]


@pytest.fixture
def make(tiny_gpt2_dir, tmp_path, monkeypatch):
    """Return a function that makes a run; its cache and working directory are empty folders."""
    monkeypatch.setenv("RL4LMS_LIKE_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return lambda **arguments: Run(tiny_gpt2_dir, **arguments)


@pytest.mark.parametrize("form", FORMS)
def test_images_are_those_that_were_given(form, make, tmp_path, monkeypatch):
    named = {"image_column": "image"} if form == "paths" else {}
    run = make(prompts=FORMS[form](tmp_path / "work"), reward=length, **named)
    monkeypatch.chdir(tmp_path)  # paths are absolute
    samples = build_datapools(run.config.datapool)["train"].samples
    for seed, sample in zip(SEEDS, samples, strict=True):
        (picture,) = sample.images
        assert np.array_equal(np.asarray(picture.open()), np.asarray(noise(seed)))
        assert sample.prompt_or_input_text == f"<image>{QUESTION}" and not sample.meta_data


def test_the_same_images_make_the_same_config(make):
    configs = [make(prompts=FORMS["images of PIL"](None), reward=length).config for _ in range(2)]
    assert configs[0].datapool == configs[1].datapool


def test_prompts_with_and_without_images_go_together(make):
    prompts = [Sample("", "Why?"), Sample("", "What?", images=(Picture.of(noise(0)),))]
    samples = build_datapools(make(prompts=prompts, reward=length).config.datapool)["train"].samples
    assert [len(sample.images) for sample in samples] == [0, 1]


@pytest.mark.parametrize("key", ["image", "image_url"])
def test_conversations_have_images_in_their_messages(key, make, tmp_path, monkeypatch):
    of_files(tmp_path / "work")
    image = noise(0) if key == "image" else {"url": "0.png"}
    conversation = [{"role": "user", "content": [{"type": key, key: image}, {"type": "text", "text": QUESTION}]}]
    run = make(prompts=[conversation], reward=length)
    monkeypatch.chdir(tmp_path)  # paths are absolute
    (sample,) = build_datapools(run.config.datapool)["train"].samples
    assert np.array_equal(np.asarray(sample.images[0].open()), np.asarray(noise(0)))
    assert sample.messages == [{"role": "user", "content": f"<image>{QUESTION}"}]


def test_a_pool_of_shapes_is_given_as_rows(make):
    pool = Shapes.prepare("train", n_train=4)
    samples = build_datapools(make(prompts=pool, reward=length).config.datapool)["train"].samples
    for sample, original in zip(samples, pool.samples, strict=True):
        assert sample.references == original.references and sample.meta_data == original.meta_data
        assert np.array_equal(*(np.asarray(item.images[0].open()) for item in (sample, original)))


def test_pairs_have_images(make):
    pair = {"prompt": QUESTION, "chosen": " red", "rejected": " blue", "image": noise(0)}
    (sample,) = build_datapools(make(data=[pair], algorithm="dpo").config.datapool)["train"].samples
    assert sample.chosen == " red" and len(sample.images) == 1


def test_a_stream_of_datasets_is_given_as_rows(make):
    stream = datasets.IterableDataset.from_generator(lambda: ({"prompt": text} for text in ("Why?", "How?")))
    assert stream.features is None
    samples = build_datapools(make(prompts=stream, reward=length).config.datapool)["train"].samples
    assert [sample.prompt_or_input_text for sample in samples] == ["Why?", "How?"]


def test_a_column_of_images_that_the_rows_lack_is_an_error(make):
    with pytest.raises(ConfigError, match="no column 'imgae'"):
        make(prompts=FORMS["pictures"](None), reward=length, image_column="imgae")


def test_a_broken_image_is_named_by_its_entry(make):
    prompts = [{"prompt": QUESTION, "image": noise(0)}, {"prompt": QUESTION, "image": 7}]
    with raises_at("prompts", mentions="entry 1"):
        make(prompts=prompts, reward=length)
    address = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]}]
    with raises_at("prompts", mentions="entry 0"):
        make(prompts=[address], reward=length)
