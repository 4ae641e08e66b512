"""Check which Stable-Baselines3 algorithms can be trained on text rollouts. This module does not import torch.

stable_baselines3.PPO, A2C, custom `train()`    yes: use log-probs and values of whole episodes
sb3_contrib.TRPO                                only with a custom policy that returns distributions over all tokens
sb3_contrib.RecurrentPPO, MaskablePPO           no: collect another kind of rollouts
stable_baselines3.DQN, SAC ...                  no: learn from single transitions
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.system.registry import derived_from

BASE = "stable_baselines3.common.on_policy_algorithm:OnPolicyAlgorithm"
TEXT = "rl4lms_like.rollouts.text_rollouts:TextRollouts"

_is_on_policy = derived_from(BASE)


def unsupported(algorithm: Any) -> str | None:
    """Return why an algorithm cannot be trained on text rollouts; None if nothing in its class prevents it."""
    if misfit := _is_on_policy(algorithm):
        return misfit
    if TEXT in [_path(cls) for cls in algorithm.__mro__]:
        return None
    if "collect_rollouts" in _members_below_base(algorithm):
        return "it has its own `collect_rollouts`, which text rollouts would replace"
    return None


def unsupported_with(algorithm: type, policy: Any) -> str | None:
    """Return why an algorithm cannot train a policy; None if nothing in their classes prevents it.

    Args:
        algorithm: class derived from `OnPolicyAlgorithm`.
        policy: class of the policy.
    """
    # `co_names` lists the attributes that a function's code reads, so that nothing needs to be called.
    attributes: set[str] = set()
    for member in _members_below_base(algorithm).values():
        for function in member:
            code = getattr(function, "__code__", None)
            attributes.update(getattr(code, "co_names", ()))
    if "get_distribution" not in attributes or hasattr(policy, "get_distribution"):
        return None
    return (
        f"it calls the policy's `get_distribution`, which {policy.__name__} does not have; this library's `trpo` does "
        f"not need it"
    )


def _members_below_base(algorithm: type) -> dict[str, list[Any]]:
    """Return what an algorithm and its bases below `OnPolicyAlgorithm` define, by name."""
    members: dict[str, list[Any]] = {}
    for cls in algorithm.__mro__:
        if _path(cls) == BASE:
            break
        for name, member in vars(cls).items():
            members.setdefault(name, []).append(member)
    return members


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
