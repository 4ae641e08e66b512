"""GEM-metrics' statistics by hand."""

from __future__ import annotations

import math

import pytest

from rl4lms_like.metrics.diversity import diversity

pytestmark = pytest.mark.usefixtures("language_data")


def test_a_small_corpus_by_hand():
    found = diversity(["A a b.", "a c"], window_size=3)
    # tokens: a a b . | a c
    assert found["msttr-3"] == pytest.approx((2 / 3 + 3 / 3) / 2, abs=1e-5)
    assert found["msttr-3_nopunct"] == pytest.approx(2 / 3, abs=1e-5)
    assert (found["total_length"], found["total_length-nopunct"]) == (6, 5)
    assert (found["mean_pred_length"], found["std_pred_length"], found["median_pred_length"]) == (3, 1, 3)
    assert (found["min_pred_length"], found["max_pred_length"]) == (2, 4)
    assert (found["vocab_size-1"], found["unique-1"], found["distinct-1"]) == (4, 3, pytest.approx(4 / 6))
    assert found["entropy-1"] == pytest.approx(0.5 * 1 + 3 * (1 / 6) * math.log2(6))
    assert (found["vocab_size-2"], found["unique-2"], found["distinct-2"]) == (4, 4, 1)
    # 2-grams: aa ab b. ac, each 1/4; contexts: a 3/6, b 1/6
    assert found["cond_entropy-2"] == pytest.approx(3 / 4 * math.log2(2) + 1 / 4 * math.log2((1 / 6) / (1 / 4)))


def test_nothing_generated_is_no_error():
    found = diversity(["", ""], window_size=2)
    assert math.isnan(found["msttr-2"])
    assert {value for name, value in found.items() if not name.startswith("msttr")} == {0.0}
