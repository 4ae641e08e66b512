"""Statistics over seeds: golden numbers by hand, laws, and figures of `rliable`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl4lms_like.benchmarking.statistics import (
    bootstrap_band,
    bootstrap_interval,
    compare_scores,
    interquartile_mean,
    probability_of_improvement,
    summarize,
)

scores = st.lists(st.floats(-100, 100).map(lambda x: round(x, 2)), min_size=2, max_size=12)


def test_the_interquartile_mean_by_hand():
    assert interquartile_mean([1.0, 2, 3, 4]) == 2.5
    assert interquartile_mean([100.0, 2, 3, -50]) == 2.5  # one of four goes at each end
    assert interquartile_mean([0.0, 1, 2, 3, 4, 5, 6, 90]) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean([1.0, 2, 6]) == 3  # a quarter of three is none
    assert interquartile_mean([7.0]) == 7


def test_a_summary_by_hand():
    summary = summarize([1.0, 2, 3, 4])
    assert (summary.n, summary.mean, summary.iqm) == (4, 2.5, 2.5)
    assert summary.std == pytest.approx(np.sqrt(5 / 3))


def test_one_seed_has_no_spread_and_no_interval():
    summary = summarize([0.3])
    assert (summary.mean, summary.iqm, summary.std) == (0.3, 0.3, None)
    assert summary.iqm_interval is summary.mean_interval is None
    assert compare_scores([1.0], [0.0, 0.5]).improvement_interval is None


def test_the_interval_is_the_exact_one_where_all_draws_can_be_counted():
    """Three scores have 27 draws; the percentiles of their means are known."""
    values = np.array([0.0, 1.0, 5.0])
    means = [np.mean(draw) for draw in itertools.product(values, repeat=3)]
    low, high = bootstrap_interval(np.mean, values)
    assert (low, high) == (min(means), max(means))  # each end has 1/27 of the draws, more than 2.5 %


def test_the_bootstrap_is_stratified():
    """Each side is drawn anew by itself: a side without spread adds none."""

    def difference(a, b, axis=-1):
        return np.mean(a, axis=axis) - np.mean(b, axis=axis)

    spread, constant = np.array([0.0, 1.0, 2.0, 3.0]), np.full(7, 1.0)
    low, high = bootstrap_interval(difference, spread, constant)
    alone = bootstrap_interval(np.mean, spread)
    assert (low, high) == pytest.approx((alone[0] - 1, alone[1] - 1), abs=0.15)
    assert bootstrap_interval(difference, constant, constant) == (0, 0)


def test_intervals_are_the_same_in_every_report():
    values = np.random.default_rng(0).normal(size=10)
    assert bootstrap_interval(np.mean, values) == bootstrap_interval(np.mean, values)


def test_an_interval_covers_the_truth_as_often_as_percentiles_of_ten_seeds_can():
    """95 % for many seeds; ten seeds' percentile intervals are known to be too short by some points."""
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(300, 10))
    intervals = [bootstrap_interval(np.mean, sample, n_resamples=500) for sample in samples]
    assert 0.85 < np.mean([low <= 0 <= high for low, high in intervals]) < 0.95


@settings(max_examples=25, deadline=None)
@given(scores)
def test_an_interval_lies_within_the_scores_and_around_their_center(values):
    low, high = bootstrap_interval(np.mean, np.array(values), n_resamples=500)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert low - 1e-9 <= np.mean(values) <= high + 1e-9 or len(values) > 2


@settings(max_examples=100, deadline=None)
@given(scores, scores)
def test_the_chances_of_both_sides_sum_to_one_ties_or_not(a, b):
    assert probability_of_improvement(a, b) + probability_of_improvement(b, a) == pytest.approx(1)


def test_the_probability_of_improvement_by_hand():
    assert probability_of_improvement([1.0, 2, 3, 4], [0.0, 1, 2, 3]) == (1.5 + 2.5 + 3.5 + 4) / 16
    assert probability_of_improvement([1.0, 2], [1.0, 2]) == 0.5
    assert probability_of_improvement([2.0, 3], [0.0, 1]) == 1
    assert probability_of_improvement([1.0, 1], [1.0, 0]) == 0.75


def test_it_is_the_mann_whitney_statistic():
    from scipy.stats import mannwhitneyu

    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 6, 9).astype(float), rng.integers(0, 6, 7).astype(float)
    assert probability_of_improvement(a, b) == pytest.approx(mannwhitneyu(a, b).statistic / 63)


def test_a_band_moves_whole_runs():
    """Two runs that never cross: every draw's curve is a mixture of them, so the band is as wide as they are apart."""
    runs = np.array([np.zeros(5), np.ones(5)])
    low, high = bootstrap_band(runs)
    assert low.tolist() == [0] * 5 and high.tolist() == [1] * 5


def test_a_long_curve_has_the_band_of_its_points_one_by_one():
    """Points are drawn in chunks; the draws are the same in each."""
    runs = np.random.default_rng(0).normal(size=(5, 600))
    low, high = bootstrap_band(runs)
    for point in (0, 255, 256, 599):
        alone_low, alone_high = bootstrap_band(runs[:, [point]])
        assert (low[point], high[point]) == (alone_low[0], alone_high[0])
    assert len(low) == len(high) == 600


A = [0.904, 0.444, 0.742, 0.643, 0.655, 0.678, 0.498, 0.677, 0.613, 1.032]
B = [0.647, 0.578, 0.586, 0.54, 0.493, 0.573, 0.678, 0.591]


def test_rliable_says_the_same():
    """What rliable 1.2.0 gives for these scores: 50,000 resamples for the IQM, 20,000 for the improvement."""
    compared = compare_scores(A, B)
    assert compared.a.iqm == pytest.approx(0.668)
    assert compared.b.iqm == pytest.approx(0.582)
    assert compared.a.iqm_interval == pytest.approx((0.5782, 0.7958), abs=0.004)
    assert compared.b.iqm_interval == pytest.approx((0.5460, 0.6318), abs=0.004)
    assert compared.improvement == pytest.approx(0.73125)
    assert compared.improvement_interval == pytest.approx((0.4625, 0.9625), abs=0.0126)  # steps of 1/80
