"""The `doctor` block of a run's config: thresholds of the alerts. Does not import torch.

    max_length_correlation: null      switches one alert off
    enabled: false                    switches all alerts off

The defaults are chosen so that healthy runs have no alerts; `python -m benchmarks.healthy_runs` measures this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl4lms_like.system.numbers import Count, Finite, Fraction, NonNegative, Positive


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
        enabled: check every iteration and every evaluation on `val`.
        patience: number of consecutive iterations in which a condition must hold before it is reported.
        window: number of iterations of the conditions that need a longer history: `max_length_correlation`,
            `min_explained_variance`, `max_value_loss_growth`, and `min_reward_spread` in small rollouts.
        max_ratio_gap: alert if an update's first ratio differs from 1 by more than this; `auto`: 0.001, with `dtype:
            bfloat16` 0.4.
        kl_times_target: with `alg.kl_div.target_kl`: alert if the KL to the reference is above this multiple of it.
        max_kl: without `alg.kl_div.target_kl`: alert if the KL to the reference is above this, in nats per token.
        max_negative_kl: alert if the estimated KL is below minus this value, in nats per token.
        min_entropy: alert if the entropy of the policy is below this, in nats per token, unless the policy has solved
            its task.
        min_entropy_share: alert if the entropy is below this fraction of the first iteration's, unless the policy has
            solved its task.
        min_reward_spread: alert if the range of a rollout's episode rewards, divided by the largest absolute reward, is
            below this or 0, unless the policy improved to the best reward. In rollouts with fewer than 8 episodes this
            must hold for `window` iterations.
        min_differing_groups: alert if the fraction of groups whose rewards differ is below this, without
            `dynamic_sampling`, unless the policy has solved its task.
        min_kept_groups: alert if `dynamic_sampling` keeps less than this fraction of the generated groups.
        max_value_loss_growth: alert if the value loss is above this multiple of its previous median and above the mean
            square of the rewards.
        min_explained_variance: alert if the explained variance of the returns stays below this without improving,
            although rewards differ.
        max_truncated_share: alert if at least this fraction of the responses reaches the length limit and it was less
            in the first iteration.
        max_empty_share: alert if at least this fraction of the responses ends with its first token.
        max_duplicate_share: alert if the most frequent response to several prompts is more than this fraction of a
            rollout, and by 0.25 more than in the first iteration.
        max_near_duplicate_share: alert if more than this fraction of the responses has a near duplicate with another
            prompt, and by 0.25 more than in the first iteration.
        max_length_correlation: alert if the rank correlation of length and reward, as a mean over `window`, is above
            this or below minus this.
        max_clip_fraction: alert if the fraction of tokens whose ratio is outside the clip range, as a mean over an
            update, is above this.
        max_approx_kl: alert if the KL of an update to the rollout's policy, as a mean over the update, is above this,
            in nats per token.
        min_minibatch_episodes: alert if minibatches have fewer episodes than this, as a mean over an update.
        no_learning: alert if updates have no effect: the gradient is 0, or TRPO's line search accepts no step.
        max_held_out_fall: alert if a metric on `val` has fallen from its best score by more than this fraction while
            the reward rose.
        held_out: metrics for `max_held_out_fall`; default: all metrics for which it is known whether higher is better,
            except the reward itself.
    """

    enabled: bool = True
    patience: Count = 3
    window: Count = 10
    max_ratio_gap: Positive | Literal["auto"] | None = "auto"
    kl_times_target: Positive | None = 3.0
    max_kl: Positive | None = 2.5
    max_negative_kl: NonNegative | None = 0.1
    min_entropy: NonNegative | None = 0.01
    min_entropy_share: Fraction | None = 0.02
    min_reward_spread: NonNegative | None = 1e-5
    min_differing_groups: Fraction | None = 0.1
    min_kept_groups: Fraction | None = 0.1
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
