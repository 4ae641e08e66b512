"""The `doctor` block of a run's config: from where on a sign is told. Loads no torch.

    null switches an alarm off        max_length_correlation: null
    enabled: false                    all of them

Defaults are such that healthy runs are quiet; `python -m benchmarks.healthy_runs` counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rl4lms_like.core.numbers import Count, Finite, NonNegative, Positive, Share


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """A metric that must not fall while the reward rises.

    Args:
        metric: a key of the metrics on `val`, `lexical/meteor`.
        mode: whether it is to be large (`max`) or small (`min`).
    """

    metric: str
    mode: Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The `doctor` block: when the run doctor tells what it sees. It reports, and changes nothing.

    Args:
        enabled: look at every iteration.
        patience: iterations in a row that a sign must last before it is told.
        window: iterations over which the correlation of length and reward is averaged, and the value loss before is
            looked at.
        max_ratio_gap: largest distance of an update's first ratio from 1; `auto`: 0.001, in bfloat16 0.05.
        kl_times_target: KL to the reference, in multiples of `alg.kl_div.target_kl`.
        max_kl: KL to the reference where there is no target, nats per token.
        max_negative_kl: how far below 0 the estimated KL may be, nats per token.
        min_entropy: nats per token.
        min_entropy_share: share of the first iteration's entropy; a policy that has solved its task has no alarm.
        min_reward_spread: largest minus smallest reward of a rollout's episodes, as a share of the largest size; a
            policy that rose to the best reward has no alarm. Of fewer than 8 episodes, over `window` iterations.
        max_value_loss_growth: value loss, in multiples of its median before, where it is more than the mean square of
            what is paid.
        min_explained_variance: of the returns by the critic, where it does not get better and rewards differ.
        max_truncated_share: share of responses that hit the length limit, where they could end before.
        max_empty_share: share of responses that end at once.
        max_duplicate_share: share of the most frequent response to several prompts, where it has grown.
        max_near_duplicate_share: share of responses with a near twin under another prompt, where it has grown.
        max_length_correlation: rank correlation of length and reward, either sign.
        max_clip_fraction: share of tokens whose ratio left the clip range, mean over an update.
        max_approx_kl: KL of an update to the rollout's policy, nats per token, mean over the update.
        min_minibatch_episodes: episodes per minibatch, mean over an update.
        no_learning: tell where updates change nothing: no gradient, or no step of TRPO's line search.
        max_held_out_fall: how far a metric on `val` may fall from its best while the reward rises, as a share.
        held_out: the metrics meant; default: those of known direction that are not the reward itself.
    """

    enabled: bool = True
    patience: Count = 3
    window: Count = 10
    max_ratio_gap: Positive | Literal["auto"] | None = "auto"
    kl_times_target: Positive | None = 3.0
    max_kl: Positive | None = 4.0
    max_negative_kl: NonNegative | None = 0.1
    min_entropy: NonNegative | None = 0.01
    min_entropy_share: Share | None = 0.02
    min_reward_spread: NonNegative | None = 1e-5
    max_value_loss_growth: Positive | None = 10.0
    min_explained_variance: Finite | None = -1.0
    max_truncated_share: Share | None = 0.99
    max_empty_share: Share | None = 0.9
    max_duplicate_share: Share | None = 0.5
    max_near_duplicate_share: Share | None = 0.5
    max_length_correlation: Share | None = 0.9
    max_clip_fraction: Share | None = 0.5
    max_approx_kl: Positive | None = 0.2
    min_minibatch_episodes: Count | None = 4
    no_learning: bool = True
    max_held_out_fall: Share | None = 0.25
    held_out: list[HeldOutConfig] = field(default_factory=list)
