"""Shapes: what a picture shows is the answer, and no picture is in two splits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rl4lms_like.data_pools.shapes import BACKGROUND, COLORS, POSITIONS, QUESTIONS, Shapes
from rl4lms_like.testing.checkers import check_data_pool

SPLITS = ("train", "val", "test")


def drawn_mask(sample) -> np.ndarray:
    """Return which pixels of a sample's picture are not background: [side, side]."""
    (picture,) = sample.images
    return (np.asarray(picture.open()) != BACKGROUND).any(axis=-1)


def n_regions(mask: np.ndarray) -> int:
    """Count the connected regions of a mask with a flood fill."""
    rest = set(zip(*np.nonzero(mask), strict=True))
    n = 0
    while rest:
        n += 1
        front = [rest.pop()]
        while front:
            y, x = front.pop()
            for neighbour in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if neighbour in rest:
                    rest.remove(neighbour)
                    front.append(neighbour)
    return n


def test_the_pool_passes_the_checker():
    check_data_pool(Shapes, n_train=20, n_eval=5)


@pytest.mark.parametrize("side", [32, 45, 56, 100])
def test_the_answers_are_what_the_pictures_show(side):
    samples = Shapes.prepare("train", questions=list(QUESTIONS), n_train=150, side=side).samples
    for sample in samples:
        mask = drawn_mask(sample)
        (picture,) = sample.images
        (answer,) = sample.references
        question = sample.meta_data["question"]
        assert sample.prompt_or_input_text == f"<image>{QUESTIONS[question]}"
        colors = {tuple(pixel) for pixel in np.asarray(picture.open())[mask].tolist()}
        assert len(colors) == 1
        if question == "color":
            assert colors == {COLORS[answer]} and n_regions(mask) == 1
        elif question == "count":
            assert str(n_regions(mask)) == answer
        else:
            y, x = np.argwhere(mask).mean(axis=0) / len(mask)  # centre, as fractions of height and width
            nearest = min(POSITIONS, key=lambda name: np.hypot(x * 6 - POSITIONS[name][0], y * 6 - POSITIONS[name][1]))
            assert nearest == answer


@pytest.mark.parametrize(("question", "n_answers"), [("color", 6), ("count", 4), ("position", 4)])
def test_all_answers_occur_about_equally_often(question, n_answers):
    samples = Shapes.prepare("train", questions=[question], n_train=600).samples
    counts = Counter(sample.references[0] for sample in samples)
    assert len(counts) == n_answers
    assert min(counts.values()) > 0.6 * 600 / n_answers and max(counts.values()) < 1.4 * 600 / n_answers


def test_no_picture_is_in_two_splits_with_any_seed():
    numbers = {split: set() for split in SPLITS}
    for split in SPLITS:
        for seed in range(3):
            samples = Shapes.prepare(split, list(QUESTIONS), n_train=200, n_eval=200, seed=seed, side=32).samples
            numbers[split] |= {sample.images[0].number for sample in samples}
    assert not numbers["train"] & numbers["val"] | numbers["train"] & numbers["test"] | numbers["val"] & numbers["test"]


def test_fewer_samples_are_the_first_of_more_and_a_seed_gives_the_same():
    some, more = (Shapes.prepare("val", n_eval=n).samples for n in (5, 20))
    assert some == more[:5] == Shapes.prepare("val", n_eval=5).samples
    assert some != Shapes.prepare("val", n_eval=5, seed=1).samples


def test_a_constant_picture_shows_nothing_and_the_questions_stay():
    control = Shapes.prepare("train", n_train=50, constant=True).samples
    samples = Shapes.prepare("train", n_train=50).samples
    assert len({sample.images for sample in control}) == 1 and not drawn_mask(control[0]).any()
    for one, other in zip(control, samples, strict=True):
        assert (one.id, one.prompt_or_input_text, one.references) == (
            other.id,
            other.prompt_or_input_text,
            other.references,
        )


def test_the_side_is_that_of_the_pictures():
    assert Shapes.prepare("train", n_train=1, side=100).samples[0].images[0].open().size == (100, 100)
