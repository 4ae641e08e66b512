"""Single-rollout actor-critic optimisation (SAO, arXiv 2607.07508)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl4lms_like.algorithms.arguments import SAOArguments
from rl4lms_like.algorithms.ppo import PPO

ATTENTION = "(?i)attn|attention"
"""Names of the parameters of attention layers, in all supported architectures."""


class SAO(PPO):
    """PPO that masks actions outside a band of ratios instead of clipping them, with more passes of the critic.

    All of its techniques are arguments of PPO and of its policy; only the defaults differ.
    """

    arguments_class = SAOArguments

    def policy_defaults(self, policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        # A shared critic has no attention layers of its own: freezing them would freeze the policy's.
        if policy_kwargs.get("critic") == "shared":
            return {}
        return {"critic_frozen": [ATTENTION]}
