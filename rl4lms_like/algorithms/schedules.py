"""Learning-rate schedules as functions of the remaining progress, which decreases from 1 to 0.

constant    ▔▔▔▔      linear    ▔╲__      cosine    ▔╲_▁      as Stable-Baselines3's `Schedule`
"""

from __future__ import annotations

import math

from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import LinearSchedule


def learning_rate_schedule(learning_rate: float, name: str) -> float | Schedule:
    """Return a Stable-Baselines3 schedule: `constant`, or `linear` / `cosine` decay to 0."""
    # A number is a constant schedule for Stable-Baselines3. The linear one goes from the rate to 0 over the whole run.
    if name == "linear":
        return LinearSchedule(learning_rate, 0.0, 1.0)
    if name == "cosine":
        return CosineSchedule(learning_rate)
    return learning_rate


class CosineSchedule:
    """Half a cosine from `initial` at remaining progress 1 to 0 at remaining progress 0."""

    def __init__(self, initial: float) -> None:
        self.initial = initial

    def __call__(self, progress_remaining: float) -> float:
        # rate(p) = initial (1 - cos(pi p)) / 2, with p from 1 to 0
        return self.initial * (1 - math.cos(math.pi * progress_remaining)) / 2
