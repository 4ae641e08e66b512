"""Inputs and output of alerts.

    (History, Case) ─ alert ─> Finding, or None if there is no problem

Alerts are pure functions: the same numbers give the same finding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl4lms_like.training.doctor.history import History
from rl4lms_like.training.doctor.thresholds import DoctorConfig


@dataclass(frozen=True)
class Case:
    """Properties of a run that its alerts need.

    Args:
        limits: the `doctor` block of the config.
        max_ratio_gap: largest accepted distance of an update's first ratio from 1; None switches the alert off.
        ratio_cause: likely cause of a larger distance, in words.
        target_kl: target of the KL controller.
        kl_per_sequence: whether the target is per response instead of per token.
        estimates_kl: whether the KL penalty uses the estimator that can be negative (`estimator: k1`).
        is_masked: whether a mask restricts the sampled tokens (NLPO).
        norm_reward: whether the critic is trained on rewards divided by their standard deviation.
        has_batch_size: whether the algorithm has a `batch_size`.
        rl4lms_steps: optimizer steps per iteration of RL4LMs with the same values.
        can_end: whether responses can end before the length limit.
        step_keys: config keys that reduce the size of updates.
        critic_keys: config keys that reduce the size of the critic's updates.
        modes: metric key -> `max` or `min`, of the held-out metrics that must not get worse while the reward rises.
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
    """Result of an alert.

    Args:
        said: one sentence with the observed numbers.
        advice: what to change, and in which direction.
        evidence: the numbers.
        metric: key of the metric concerned, if any.
    """

    said: str
    advice: str
    evidence: dict[str, float | list[float]]
    metric: str = ""


Alarm = Callable[[History, Case], "Finding | None"]


def listed(values: Sequence[float]) -> str:
    """Format numbers as a comma-separated list with three significant digits."""
    return ", ".join(f"{value:.3g}" for value in values)


def all_above(values: Sequence[float], limit: float) -> bool:
    """Return True if there are values and all of them are above a limit."""
    return bool(values) and min(values) > limit


def all_below(values: Sequence[float], limit: float) -> bool:
    """Return True if there are values and all of them are below a limit."""
    return bool(values) and max(values) < limit
