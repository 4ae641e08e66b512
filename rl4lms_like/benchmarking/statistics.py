"""Statistics over seeds: means, interquartile means, bootstrap intervals, probability of improvement.

    scores [n_seeds] ──► n, mean, std, range, IQM, 95 % interval of the IQM
    a [n], b [m]     ──► P(a > b) = fraction of pairs with a > b, a tie counts half; with its 95 % interval

The statistics follow Agarwal et al. (arXiv 2108.13264). The bootstrap is stratified: each sample is resampled
separately. Its intervals are percentiles, as in the paper, and it is seeded, so that reports are reproducible. With
fewer than five seeds there are no intervals, because they would lie within the range of the scores and suggest too
much certainty.

The implementation uses scipy instead of the authors' package `rliable`, whose release 1.2 needs `arch` 7.2, which
cannot be imported together with pandas 3. The numbers of both agree (`tests/benchmarking/test_statistics.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl4lms_like.system.errors import import_extra

N_RESAMPLES = 10_000
MIN_SEEDS = 5
"""Number of seeds below which the range of the scores is reported instead of an interval."""

Interval = tuple[float, float]
Statistic = Callable[..., Any]


@dataclass(frozen=True)
class Summary:
    """Summary of one metric of one label over its seeds.

    Args:
        n: number of seeds.
        mean: mean score.
        std: sample standard deviation (divisor n - 1); None for one seed.
        range: lowest and highest score.
        iqm: interquartile mean: the mean without the lowest and the highest quarter.
        iqm_interval: 95 % bootstrap interval of the IQM; None below `MIN_SEEDS`.
        mean_interval: 95 % bootstrap interval of the mean; None below `MIN_SEEDS`.
    """

    n: int
    mean: float
    std: float | None
    range: Interval
    iqm: float
    iqm_interval: Interval | None
    mean_interval: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Summaries of one metric of two labels, a - b of their means, and P(a > b) + P(a = b) / 2 of their runs.

    The 95 % bootstrap intervals of both are None if a label has fewer than `MIN_SEEDS`.
    """

    a: Summary
    b: Summary
    difference: float
    difference_interval: Interval | None
    improvement: float
    improvement_interval: Interval | None


def summarize(scores: Sequence[float] | np.ndarray) -> Summary:
    """Summarize one or more scores."""
    values = np.asarray(scores, dtype=float)
    return Summary(
        n=len(values),
        mean=float(values.mean()),
        std=float(values.std(ddof=1)) if len(values) > 1 else None,
        range=(float(values.min()), float(values.max())),
        iqm=float(interquartile_mean(values)),
        iqm_interval=interval_over_seeds(interquartile_mean, values),
        mean_interval=interval_over_seeds(np.mean, values),
    )


def compare_scores(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Compare two samples of scores. They may have different sizes, and seeds are not paired."""

    def difference(x: Any, y: Any, axis: int) -> Any:
        return np.mean(x, axis=axis) - np.mean(y, axis=axis)

    first = summarize(a)
    second = summarize(b)
    return Comparison(
        a=first,
        b=second,
        difference=first.mean - second.mean,
        difference_interval=interval_over_seeds(difference, a, b),
        improvement=float(probability_of_improvement(a, b)),
        improvement_interval=interval_over_seeds(probability_of_improvement, a, b),
    )


def interquartile_mean(scores: Any, axis: int = -1) -> Any:
    """Compute the mean without the lowest and highest quarters, rounded down; the mean for fewer than four scores.

    Args:
        scores: `[..., n]`.
        axis: axis of the scores.
    """
    stats = import_extra("scipy.stats", extra="benchmark", needed_by="the interquartile mean")
    return stats.trim_mean(scores, 0.25, axis=axis)


def probability_of_improvement(a: Any, b: Any, axis: int = -1) -> Any:
    """Compute P(a > b) + P(a = b) / 2 over all pairs, the Mann-Whitney statistic divided by the number of pairs.

    Args:
        a: `[..., n]`.
        b: `[..., m]`.
        axis: axis of the scores.
    """
    # [..., n, 1] and [..., 1, m]: compared with each other, all pairs [..., n, m].
    first = np.moveaxis(np.asarray(a), axis, -1)[..., :, None]
    second = np.moveaxis(np.asarray(b), axis, -1)[..., None, :]
    return ((first > second) + 0.5 * (first == second)).mean(axis=(-2, -1))


def interval_over_seeds(statistic: Statistic, *samples: Any) -> Interval | None:
    """Compute `bootstrap_interval` of scores over seeds; None if a sample has fewer than `MIN_SEEDS`."""
    if min(map(len, samples)) < MIN_SEEDS:
        return None
    low, high = bootstrap_interval(statistic, *samples)
    return float(low), float(high)


def bootstrap_interval(
    statistic: Statistic, *samples: Any, n_resamples: int = N_RESAMPLES, axis: int = -1
) -> tuple[Any, Any]:
    """Compute the 95 % interval of a statistic with the stratified percentile bootstrap.

    Args:
        statistic: function of the samples and `axis`.
        samples: `[..., n]` each, n > 1; each is resampled separately, with replacement.
        n_resamples: number of resamples.
        axis: axis that is resampled. With `[n_seeds, n_points]` and 0, whole runs are resampled.
    """
    stats = import_extra("scipy.stats", extra="benchmark", needed_by="a bootstrap interval")

    # The same seed each time: an unchanged benchmark has an unchanged report. The batch limits the memory to about 10^7
    # resampled numbers of the first sample at a time.
    interval = stats.bootstrap(
        samples,
        statistic,
        n_resamples=n_resamples,
        batch=min(1000, 1 + 10**7 // np.size(samples[0])),
        vectorized=True,
        axis=axis,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return interval.low, interval.high


def bootstrap_band(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute both ends of the IQM's interval, `[n_points]` each, from curves `[n_seeds, n_points]` of whole runs."""
    return bootstrap_interval(interquartile_mean, scores, n_resamples=2_000, axis=0)
