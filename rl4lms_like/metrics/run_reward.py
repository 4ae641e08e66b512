"""The run's own reward as a metric: what it would pay for the responses of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rl4lms_like.core.generated import Generated
from rl4lms_like.metrics.base import GeneratedMetric, MetricResults
from rl4lms_like.scoring.score import mean

PREFIX = "reward/"
PART = "reward/parts/{}"
"""Keys of the results."""


@dataclass(frozen=True)
class EpisodeRewards:
    """Rewards of whole responses.

    Args:
        totals: reward of each response `[n]`.
        parts: name -> contribution of that part of a combined reward `[n]`, NaN where it returned None.
    """

    totals: list[float]
    parts: Mapping[str, list[float]]


class RewardMetric(GeneratedMetric):
    """The run's own reward of the responses: mean, standard deviation, and the mean of each part of a combined reward.

    Attributes:
        rewards_of: scores responses; set by the run.
    """

    rewards_of: Callable[[Sequence[Generated]], EpisodeRewards] | None = None

    def results_of(self, generated: Sequence[Generated]) -> MetricResults:
        """Return the rewards that the run's reward function gives to the responses."""
        if self.rewards_of is None:
            raise ValueError("the metric 'reward' is the reward of an RL run, and there is none here")
        rewards = self.rewards_of(generated)

        results: MetricResults = {
            "reward/mean": (rewards.totals, fmean(rewards.totals)),
            "reward/std": (None, pstdev(rewards.totals)),
        }
        for name, values in rewards.parts.items():
            results[PART.format(name)] = (values, mean(values))
        return results
