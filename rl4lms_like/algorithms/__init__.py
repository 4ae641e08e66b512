"""Reinforcement-learning algorithms, one file per loss.

from rl4lms_like.algorithms import ALGORITHMS
ALGORITHMS.resolve("ppo")     imports torch; the import of the table does not
"""

from __future__ import annotations

from rl4lms_like.core.registry import Entry, Registry
from rl4lms_like.rollouts.supported import unsupported

ALGORITHMS = Registry(
    "algorithm",
    group="rl4lms_like.algorithms",
    misfit=unsupported,
    table={
        "ppo": Entry(
            "rl4lms_like.algorithms.ppo:PPO",
            "proximal policy optimisation: clipped ratios, several epochs over a rollout",
            arguments="rl4lms_like.algorithms.arguments:PPOArguments",
        ),
        "nlpo": Entry(
            "rl4lms_like.algorithms.nlpo:NLPO",
            "PPO over the tokens allowed by a lagging copy of the policy; needs a maskable policy",
            arguments="rl4lms_like.algorithms.arguments:NLPOArguments",
        ),
        "vapo": Entry(
            "rl4lms_like.algorithms.vapo:VAPO",
            "PPO with a pretrained critic, length-adaptive lambda and imitation of good episodes",
            arguments="rl4lms_like.algorithms.arguments:VAPOArguments",
        ),
        "sao": Entry(
            "rl4lms_like.algorithms.sao:SAO",
            "PPO that masks actions outside a band of ratios; one pass of the policy, two of a partly frozen critic",
            arguments="rl4lms_like.algorithms.arguments:SAOArguments",
        ),
        "a2c": Entry(
            "rl4lms_like.algorithms.a2c:A2C",
            "advantage actor-critic: one gradient step on the whole rollout",
            arguments="rl4lms_like.algorithms.arguments:A2CArguments",
        ),
        "trpo": Entry(
            "rl4lms_like.algorithms.trpo:TRPO",
            "trust region policy optimisation: one step limited by the KL; the critic is trained separately",
            arguments="rl4lms_like.algorithms.arguments:TRPOArguments",
        ),
    },
)
"""Algorithms by id (`alg.id`)."""

__all__ = ["ALGORITHMS"]
