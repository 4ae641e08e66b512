"""Check which Stable-Baselines3 algorithms can be trained on text rollouts. This module does not import torch.

stable_baselines3.PPO, A2C, custom `train()`    yes: use log-probs and values of whole episodes
sb3_contrib.TRPO                                only with a custom policy that returns distributions over all tokens
sb3_contrib.RecurrentPPO, MaskablePPO           no: collect another kind of rollouts
stable_baselines3.DQN, SAC ...                  no: learn from single transitions
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.core.registry import derived_from

BASE = "stable_baselines3.common.on_policy_algorithm:OnPolicyAlgorithm"
TEXT = "rl4lms_like.rollouts.text_rollouts:TextRollouts"

_is_on_policy = derived_from(BASE)


def unsupported(algorithm: Any) -> str | None:
    """Return why an algorithm cannot be trained on text rollouts; None if nothing in its class prevents it."""
    if misfit := _is_on_policy(algorithm):
        return misfit
    names = [f"{each.__module__}:{each.__qualname__}" for each in algorithm.__mro__]
    if TEXT in names:
        return None
    own = [vars(each) for each in algorithm.__mro__[: names.index(BASE)]]
    if any("collect_rollouts" in members for members in own):
        return "it has its own `collect_rollouts`, which text rollouts would replace"
    return None


def unsupported_with(algorithm: type, policy: Any) -> str | None:
    """Return why an algorithm cannot train a policy; None if nothing in their classes prevents it.

    Args:
        algorithm: class derived from `OnPolicyAlgorithm`.
        policy: class of the policy.
    """
    names = [f"{each.__module__}:{each.__qualname__}" for each in algorithm.__mro__]
    members = [member for each in algorithm.__mro__[: names.index(BASE)] for member in vars(each).values()]
    # `co_names` lists the attributes that a function's code reads, so that nothing needs to be called.
    asked = {name for member in members for name in getattr(getattr(member, "__code__", None), "co_names", ())}
    if "get_distribution" not in asked or hasattr(policy, "get_distribution"):
        return None
    return (
        f"it calls the policy's `get_distribution`, which {policy.__name__} does not have; this library's `trpo` does "
        f"not need it"
    )
