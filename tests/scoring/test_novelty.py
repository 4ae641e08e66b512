"""What is new is counted against all training texts, read once."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.metrics.novelty import novelty, read_texts


def test_the_example_of_the_docstring():
    found = novelty(["the cat sat on my roof"], ["the cat sat", "On my way"], max_n=2)
    assert found.of_ngrams == {1: [1 / 6], 2: [2 / 5]}
    assert found.overall == {1: 1 / 6, 2: 2 / 5}
    assert found.of_texts == [1.0]


def test_long_texts_weigh_more_in_the_whole():
    found = novelty(["a b", "x y z w"], ["a b"], max_n=1)
    assert found.of_ngrams[1] == [0.0, 1.0]
    assert found.overall[1] == pytest.approx(4 / 6)


def test_a_copy_is_not_novel_whatever_its_case_and_spaces():
    assert novelty(["The  cat.", "The cat!"], iter(["a dog", "the CAT ."]), max_n=1).of_texts == [0.0, 1.0]


def test_a_text_without_n_grams_has_no_share():
    found = novelty(["", "word"], ["word"], max_n=2)
    assert math.isnan(found.of_ngrams[1][0])
    assert found.of_ngrams[1][1] == 0.0
    assert all(map(math.isnan, found.of_ngrams[2]))
    assert math.isnan(found.overall[2])


def test_texts_are_read_from_lines_and_from_objects(tmp_path):
    plain = tmp_path / "train.txt"
    plain.write_text("one text\nanother\n", encoding="utf-8")
    assert list(read_texts(plain)) == ["one text", "another"]
    objects = tmp_path / "train.jsonl"
    objects.write_text('{"target": "one"}\n\n{"target": ["two", "three"]}\n', encoding="utf-8")
    assert list(read_texts(objects, "target")) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 1: not JSON"), ('{"text": 3}', "line 1: 'text' is neither"), ("[]", "neither")]
)
def test_lines_that_are_no_texts_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        list(read_texts(path))
