"""What an alarm is given and what it says.

    (History, Case) ─ alarm ─> Finding, or None where all is well

Alarms are pure: the same numbers give the same finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl4lms_like.training.doctor.history import History
from rl4lms_like.training.doctor.thresholds import DoctorConfig


@dataclass(frozen=True)
class Case:
    """What of a run its alarms must know.

    Args:
        limits: the `doctor` block.
        max_ratio_gap: from where on a first ratio is off 1; None switches the alarm off.
        ratio_cause: why it would be, in words.
        target_kl: what the KL controller steers to.
        kl_per_sequence: whether that is meant for a whole response.
        estimates_kl: whether what is paid for the KL is the estimate that can be below 0 (`estimator: k1`).
        is_masked: whether a mask decides which tokens are sampled (NLPO).
        norm_reward: whether the critic sees rewards divided by their standard deviation.
        has_batch_size: whether the algorithm takes several minibatches of a size of their own.
        rl4lms_steps: optimizer steps per iteration that RL4LMs takes with the same values.
        can_end: whether responses can end before the length limit.
        step_keys: the keys that make updates smaller.
        critic_keys: the keys that make the critic's smaller.
        modes: metric key -> `max` or `min`, of those that must not fall while the reward rises.
    """

    limits: DoctorConfig
    max_ratio_gap: float | None = 1e-3
    ratio_cause: str = ""
    target_kl: float | None = None
    kl_per_sequence: bool = False
    estimates_kl: bool = True
    is_masked: bool = False
    norm_reward: bool = False
    has_batch_size: bool = True
    rl4lms_steps: int | None = None
    can_end: bool = True
    step_keys: str = "alg.args.learning_rate or n_epochs"
    critic_keys: str = "alg.args.critic_learning_rate or vf_coef"
    modes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What an alarm found.

    Args:
        said: one sentence with its numbers.
        advice: what to change, in which direction.
        evidence: the numbers alone.
        metric: the key of the metric that it is about, if it is.
    """

    said: str
    advice: str
    evidence: dict[str, float | list[float]]
    metric: str = ""


Alarm = Callable[[History, Case], "Finding | None"]


def listed(values: Sequence[float]) -> str:
    """Numbers in a row, short."""
    return ", ".join(f"{value:.3g}" for value in values)


def all_above(values: Sequence[float], limit: float) -> bool:
    """Whether there are values and all of them exceed a limit."""
    return bool(values) and min(values) > limit


def all_below(values: Sequence[float], limit: float) -> bool:
    """Whether there are values and all of them fall short of a limit."""
    return bool(values) and max(values) < limit
