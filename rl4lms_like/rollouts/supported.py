"""Checks which algorithms of Stable-Baselines3's kind can be trained on text rollouts. Loads no torch.

stable_baselines3.PPO, A2C, classes with a `train()` of their own     log-probs and values of whole episodes
sb3_contrib.TRPO                          only with a policy of your own that gives distributions over all tokens
sb3_contrib.RecurrentPPO, MaskablePPO     no: collect rollouts of another kind
stable_baselines3.DQN, SAC ...            no: learn from single transitions
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.registry import derived_from

BASE = "stable_baselines3.common.on_policy_algorithm:OnPolicyAlgorithm"
TEXT = "rl4lms_like.rollouts.adapt:TextRollouts"

_is_on_policy = derived_from(BASE)


def unsupported(algorithm: Any) -> str | None:
    """Why an algorithm cannot be trained on text rollouts; None if it can, as far as its class shows."""
    if misfit := _is_on_policy(algorithm):
        return misfit
    names = [f"{each.__module__}:{each.__qualname__}" for each in algorithm.__mro__]
    if TEXT in names:
        return None
    own = [vars(each) for each in algorithm.__mro__[: names.index(BASE)]]
    if any("collect_rollouts" in members for members in own):
        return "it collects rollouts in its own way (`collect_rollouts`), which text rollouts would replace"
    return None


def unsupported_with(algorithm: type, policy: Any) -> str | None:
    """Why an algorithm cannot train a policy; None if it can, as far as their classes show.

    Args:
        algorithm: derived from `OnPolicyAlgorithm`.
        policy: its class.
    """
    names = [f"{each.__module__}:{each.__qualname__}" for each in algorithm.__mro__]
    members = [member for each in algorithm.__mro__[: names.index(BASE)] for member in vars(each).values()]
    asked = {name for member in members for name in getattr(getattr(member, "__code__", None), "co_names", ())}
    if "get_distribution" not in asked or hasattr(policy, "get_distribution"):
        return None
    return (
        f"it asks the policy for distributions (`get_distribution`), and {policy.__name__} gives log-probs; `trpo` "
        f"of this library needs none"
    )
