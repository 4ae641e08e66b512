"""Edits are as many as sacrebleu counts, and are counted in time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics.lib_ter import translation_edit_rate

from rl4lms_like.scoring import edit_rate
from rl4lms_like.scoring.edit_rate import edits

words = st.lists(st.sampled_from("abcdefgh"), max_size=30)


def edited(text, rng):
    """A copy with a run moved, doubled or left out, or a word replaced."""
    copy = list(text)
    for _ in range(rng.randrange(1, 6)):
        start, length = rng.randrange(len(copy) + 1), rng.randrange(1, 12)
        run = copy[start : start + length]
        kind = rng.randrange(4)
        if kind in (0, 1):
            del copy[start : start + length]
        if kind in (0, 2):
            place = rng.randrange(len(copy) + 1)
            copy[place:place] = run
        if kind == 3:
            copy[start : start + 1] = ["new"]
    return copy


def test_a_run_that_moves_is_one_edit():
    assert edits(["sat", "on", "the", "mat", "the", "cat"], ["the", "cat", "sat", "on", "the", "mat"]) == 1
    assert edits(["b", "c", "d", "a", "x"], ["a", "b", "c", "d", "y"]) == 2


def test_nothing_to_compare_costs_a_word_each():
    assert (edits([], ["a", "b"]), edits(["a"], []), edits([], [])) == (2, 1, 0)


@settings(deadline=None)
@given(words, words)
def test_edits_are_sacrebleus(generated, reference):
    assert edits(generated, reference) == translation_edit_rate(generated, reference)[0]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([3, 12, 40, 60]), st.sampled_from([3, 12, 200]))
def test_edits_of_moved_runs_are_sacrebleus(seed, length, n_words):
    rng = random.Random(seed)
    reference = [str(rng.randrange(n_words)) for _ in range(length)]
    generated = edited(reference, rng)
    assert edits(generated, reference) == translation_edit_rate(generated, reference)[0]


@pytest.mark.parametrize(("n_generated", "n_reference"), [(1, 300), (2, 160), (3, 76), (300, 1), (160, 5), (52, 101)])
def test_edits_of_texts_of_very_different_lengths_are_sacrebleus(n_generated, n_reference):
    """Where only columns near the diagonal are filled, and the diagonal is steep or flat."""
    rng = random.Random(n_generated)
    generated, reference = ([rng.choice("abcdef") for _ in range(n)] for n in (n_generated, n_reference))
    assert edits(generated, reference) == translation_edit_rate(generated, reference)[0]


def test_a_long_text_does_not_stop_a_training(monkeypatch):
    """sacrebleu fills every row of the table anew for each of up to 1,000 moves: minutes for thousands of words."""
    rows = 0

    def counted(*args, fill=edit_rate._row):
        nonlocal rows
        rows += 1
        return fill(*args)

    monkeypatch.setattr(edit_rate, "_row", counted)
    rng = random.Random(0)
    reference = [str(int(rng.paretovariate(0.7))) for _ in range(2400)]
    assert 1000 < edits(reference[::-1], reference) <= 2400
    assert rows == 2400
    assert 0 < edits(edited(reference, rng), reference) <= 60
    assert rows < 100 * 2400
