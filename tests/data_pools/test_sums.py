"""Sums: every question once, in the split that its text determines, with its result."""

from __future__ import annotations

from rl4lms_like.data_pools.sums import Sums, questions
from rl4lms_like.testing.checkers import check_data_pool

SPLITS = ("train", "val", "test")


def test_the_pool_passes_the_checker():
    check_data_pool(Sums, limit=20)


def test_every_question_is_in_one_split_with_its_result():
    samples = [sample for split in SPLITS for sample in Sums.prepare(split).samples]
    assert len({sample.prompt_or_input_text for sample in samples}) == len(samples) == 50 * 50
    for sample in samples:
        a, b = sample.prompt_or_input_text.removesuffix("=").split("+")
        assert sample.references == [str(int(a) + int(b))]
    assert min(len(Sums.prepare(split)) for split in ("val", "test")) >= 200


def test_a_question_is_held_out_with_any_limit():
    for split in SPLITS:
        assert set(questions(split, 30)) <= set(questions(split, 80))
