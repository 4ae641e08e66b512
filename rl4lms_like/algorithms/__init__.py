"""One file, one loss.

from rl4lms_like.algorithms import ALGORITHMS
ALGORITHMS.resolve("ppo")     imports torch; the table does not
"""

from __future__ import annotations

from rl4lms_like.core.registry import Entry, Registry

ALGORITHMS = Registry(
    "algorithm",
    group="rl4lms_like.algorithms",
    table={
        "ppo": Entry(
            "rl4lms_like.algorithms.ppo:PPO",
            "proximal policy optimisation: clipped ratios, several epochs over a rollout",
            arguments="rl4lms_like.algorithms.arguments:PPOArguments",
        ),
        "a2c": Entry(
            "rl4lms_like.algorithms.a2c:A2C",
            "advantage actor-critic: one gradient step on the whole rollout",
            arguments="rl4lms_like.algorithms.arguments:A2CArguments",
        ),
    },
)
"""Algorithms by id (`alg.id`)."""

__all__ = ["ALGORITHMS"]
