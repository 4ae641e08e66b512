"""What is new is counted against all training texts, read once."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.metrics.diversity import NoveltyMetric, read_texts


@pytest.fixture
def novelty(tmp_path):
    def computed(responses, training_texts, max_n):
        file = tmp_path / "training.txt"
        file.write_text("\n".join(training_texts), encoding="utf-8")
        results = NoveltyMetric(str(file), max_n=max_n).compute([""] * len(responses), responses, [])
        return {key.removeprefix("diversity_metrics/"): value for key, value in results.items()}

    return computed


def test_the_example_of_the_docstring(novelty):
    found = novelty(["the cat sat on my roof"], ["the cat sat", "On my way"], 2)
    assert found == {"novelty-1": ([1 / 6], 1 / 6), "novelty-2": ([2 / 5], 2 / 5), "novel_texts": ([1.0], 1.0)}


def test_long_texts_weigh_more_in_the_whole(novelty):
    scores, overall = novelty(["a b", "x y z w"], ["a b"], 1)["novelty-1"]
    assert scores == [0.0, 1.0]
    assert overall == pytest.approx(4 / 6)


def test_a_copy_is_not_novel_whatever_its_case_and_spaces(novelty):
    assert novelty(["The  cat.", "The cat!"], ["a dog", "the CAT ."], 1)["novel_texts"][0] == [0.0, 1.0]


def test_a_text_without_n_grams_has_no_share(novelty):
    found = novelty(["", "word"], ["word"], 2)
    assert math.isnan(found["novelty-1"][0][0])
    assert found["novelty-1"][0][1] == 0.0
    assert all(map(math.isnan, [*found["novelty-2"][0], found["novelty-2"][1]]))


def test_texts_are_read_from_lines_and_from_objects(tmp_path):
    plain = tmp_path / "train.txt"
    plain.write_text("one text\nanother\n", encoding="utf-8")
    assert list(read_texts(plain)) == ["one text", "another"]
    objects = tmp_path / "train.jsonl"
    objects.write_text('{"target": "one"}\n\n{"target": ["two", "three"]}\n', encoding="utf-8")
    assert list(read_texts(objects, "target")) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "datum"), [("{", "line 1: "), ('{"text": 3}', "line 1: .*'text'"), ("[]", "line 1: .*'text'")]
)
def test_lines_that_are_no_texts_are_named(tmp_path, line, datum):
    path = tmp_path / "bad.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=datum):
        list(read_texts(path))
