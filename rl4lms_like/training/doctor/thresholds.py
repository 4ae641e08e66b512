"""The `doctor` block of a run's config: thresholds of the alerts. Does not import torch.

    max_length_correlation: null      switches one alert off
    enabled: false                    switches all alerts off

The defaults are chosen so that healthy runs have no alerts; `python -m benchmarks.healthy_runs` measures this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl4lms_like.core.numbers import Count, Finite, Fraction, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Held-out metric that must not get worse while the reward rises.

    Args:
        metric: key of a metric on `val`, such as `lexical/meteor`.
        mode: whether larger (`max`) or smaller (`min`) is better.
    """

    metric: str
    mode: Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The `doctor` block: thresholds of the run doctor. It reports problems and does not change the run.

    Args:
        enabled: check every iteration.
        patience: number of consecutive iterations for which a problem must last before it is reported.
        window: number of iterations over which the correlation of length and reward is averaged, and which the value
            loss is compared with.
        max_ratio_gap: largest distance of an update's first ratio from 1; `auto`: 0.001, in bfloat16 0.05.
        kl_times_target: KL to the reference, in multiples of `alg.kl_div.target_kl`.
        max_kl: KL to the reference if there is no target, nats per token.
        max_negative_kl: how far below 0 the estimated KL may be, nats per token.
        min_entropy: entropy of the policy, nats per token.
        min_entropy_share: fraction of the first iteration's entropy; a policy that has solved its task gives no alert.
        min_reward_spread: range of a rollout's episode rewards, divided by the largest absolute reward; a policy that
            improved to the best reward gives no alert. With fewer than 8 episodes, over `window` iterations.
        max_value_loss_growth: value loss, in multiples of its previous median, if it exceeds the mean square reward.
        min_explained_variance: explained variance of the returns, if it does not improve and rewards differ.
        max_truncated_share: fraction of responses that reach the length limit, if they could end before.
        max_empty_share: fraction of responses that end with their first token.
        max_duplicate_share: fraction of the most frequent response to several prompts, if it has grown.
        max_near_duplicate_share: fraction of responses with a near duplicate of another prompt, if it has grown.
        max_length_correlation: absolute rank correlation of length and reward.
        max_clip_fraction: fraction of tokens whose ratio is outside the clip range, mean over an update.
        max_approx_kl: KL of an update to the rollout's policy, nats per token, mean over the update.
        min_minibatch_episodes: episodes per minibatch, mean over an update.
        no_learning: report updates without effect: no gradient, or no accepted step of TRPO's line search.
        max_held_out_fall: relative fall of a metric on `val` from its best while the reward rises.
        held_out: the held-out metrics; default: all metrics with a known better direction except the reward itself.
    """

    enabled: bool = True
    patience: Count = 3
    window: Count = 10
    max_ratio_gap: Positive | Literal["auto"] | None = "auto"
    kl_times_target: Positive | None = 3.0
    max_kl: Positive | None = 4.0
    max_negative_kl: NonNegative | None = 0.1
    min_entropy: NonNegative | None = 0.01
    min_entropy_share: Fraction | None = 0.02
    min_reward_spread: NonNegative | None = 1e-5
    max_value_loss_growth: Positive | None = 10.0
    min_explained_variance: Finite | None = -1.0
    max_truncated_share: Fraction | None = 0.99
    max_empty_share: Fraction | None = 0.9
    max_duplicate_share: Fraction | None = 0.5
    max_near_duplicate_share: Fraction | None = 0.5
    max_length_correlation: Fraction | None = 0.9
    max_clip_fraction: Fraction | None = 0.5
    max_approx_kl: Positive | None = 0.2
    min_minibatch_episodes: Count | None = 4
    no_learning: bool = True
    max_held_out_fall: Fraction | None = 0.25
    held_out: list[HeldOutConfig] = field(default_factory=list)
