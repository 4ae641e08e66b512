"""Repetition is counted as defined."""

from __future__ import annotations

import pytest

from rl4lms_like.metrics.diversity import DistinctN, distinct_n, top_sentence_fraction


def test_distinct_n_counts_over_all_texts():
    texts = ["a b a b", "A b c"]  # 1-grams: 7, of which a b c; 2-grams: ab ba ab, ab bc
    assert distinct_n(texts, 1) == pytest.approx(3 / 7)
    assert distinct_n(texts, 2) == pytest.approx(3 / 5)


def test_ngrams_do_not_cross_texts():
    assert distinct_n(["a b", "b a"], 2) == 1.0
    assert distinct_n(["a b", "c a b"], 2) == pytest.approx(2 / 3)


@pytest.mark.parametrize("collapsed", [["good"] * 20, ["good"] * 19 + ["good ."], [""] * 19 + ["a"], ["."] * 20])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_collapsed_texts_are_of_few_ngrams_however_short_they_are(collapsed, n):
    assert 0 < distinct_n(collapsed, n) <= 2 / 20 + 1e-9


def test_a_text_shorter_than_an_ngram_counts_as_one():
    assert distinct_n(["a", "b", "c"], 2) == 1.0
    assert distinct_n(["a", "a", "a b c"], 2) == pytest.approx(3 / 4)
    assert distinct_n([], 2) == 0.0


def test_words_and_punctuation_are_tokens():
    assert distinct_n(["don't stop, don't"], 1) == pytest.approx(3 / 4)


def test_top_sentence_share_is_of_texts():
    texts = ["A joy.  It is fun!", "Bad. it is FUN!", "It is fun! It is fun!", "Other."]
    assert top_sentence_fraction(texts) == pytest.approx(3 / 4)
    assert top_sentence_fraction(["a.", "b.", "c.", "d."]) == pytest.approx(1 / 4)
    assert top_sentence_fraction(["", ""]) == 0.0


def test_punctuation_alone_is_no_sentence():
    assert top_sentence_fraction(["One. .", "Two. .", "Three. !"]) == pytest.approx(1 / 3)
    assert top_sentence_fraction([".", "...", "?!"]) == 0.0
    assert top_sentence_fraction(["Is it 3? 3", "3", "Yes."]) == pytest.approx(2 / 3)


def test_unique_texts():
    results = DistinctN().compute([""] * 4, ["a", "a", "b", "c"], [])
    assert results["diversity_metrics/unique_texts"][1] == pytest.approx(3 / 4)
