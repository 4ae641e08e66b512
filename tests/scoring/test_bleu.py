"""BLEU by hand."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.scoring.bleu import Bleu
from tests.texts import texts


def bleu(responses, references):
    return Bleu().with_overall(texts(responses, references))


def test_one_text_by_hand():
    scores = bleu(["a b c d e"], [["a b c d f g"]])
    precisions = (4 / 5, 3 / 4, 2 / 3, 1 / 2)
    expected = math.prod(precisions) ** 0.25 * math.exp(1 - 6 / 5)
    assert scores[0] == [pytest.approx(expected)]
    assert scores[1] == pytest.approx(expected)


def test_the_brevity_penalty_counts_the_shortest_reference():
    longer, shorter = "a b c d e f g h i", "a b c d"
    assert bleu(["a b c d e"], [[longer, shorter]])[0] == [pytest.approx(1.0)]
    assert bleu(["a b c d e"], [[longer]])[0] == [pytest.approx(math.exp(1 - 9 / 5))]


def test_an_n_gram_counts_as_often_as_in_one_reference():
    scores = bleu(["a a a a a"], [["a a a a x", "a x x x x"]])
    assert scores[0] == [pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)]


def test_counts_of_a_corpus_are_summed_before_they_are_divided():
    scores = bleu(["a b c d", "x"], [["a b c d"], ["y"]])
    assert scores[0] == [1.0, 0.0]
    assert scores[1] == pytest.approx((4 / 5) ** 0.25)


def test_nothing_generated_scores_zero():
    scores = bleu(["", " "], [["a b c d"], [""]])
    assert scores == ([0.0, 0.0], 0.0)
