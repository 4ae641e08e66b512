"""Common subsequences are as long as the textbook's table says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl4lms_like.rewards import REWARDS
from rl4lms_like.scoring.rouge import lcs_length, rouge

tokens = st.lists(st.sampled_from("abc"), max_size=90)


def lcs_by_table(first, second):
    row = [0] * (len(second) + 1)
    for token in first:
        above = row[:]
        for index, other in enumerate(second):
            row[index + 1] = above[index] + 1 if token == other else max(above[index + 1], row[index])
    return row[-1]


@given(tokens, tokens)
def test_the_length_by_bits_is_the_length_by_table(first, second):
    assert lcs_length(first, second) == lcs_by_table(first, second)


def test_the_best_reference_is_chosen_for_each_type_alone():
    generated, references = ["a cat sat here"], [["here sat cat a", "a cat ran off"]]
    best = rouge(generated, references, use_single_ref=False)
    assert (best["rouge1"], best["rouge2"]) == ([1.0], [pytest.approx(1 / 3)])
    assert rouge(generated, references)["rouge2"] == [0.0]


def test_the_combination_is_the_plain_mean_of_three():
    generated, references = ["the cat sat"], [["the cat ran home"]]
    scores = rouge(generated, references)
    expected = math.fsum(scores[name][0] for name in ("rouge1", "rouge2", "rougeL")) / 3
    assert REWARDS.get("rouge_combined")([""], generated, references, [True]) == [pytest.approx(expected)]
