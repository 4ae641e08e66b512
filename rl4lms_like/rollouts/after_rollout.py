"""Consumers of a rollout whose rewards are in the buffer, and the numbers that they log.

engine_gaps       log-probs of an external engine against the policy's      rollout_info/engine/...
update_sampler    rewards of the episodes for the sampler of the prompts    rollout_info/sampler/...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from stable_baselines3.common.vec_env import VecEnv

from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.rollout import Rollout
from rl4lms_like.system.ranks import Ranks


def engine_gaps(rollout: Rollout, buffer: EpisodeBuffer, policy: LMActorCriticPolicy, ranks: Ranks) -> dict[str, float]:
    """Return how far an external engine's log-probs differ from those that are trained, which are the policy's own.

    There is nothing to compare without an external engine, or if it has not generated the rollout.

    Raises:
        EngineError: they differ by more than the engine's limit.
    """
    engine = policy.engine.external
    episodes = buffer.episodes
    if engine is None or episodes is None or rollout.is_replayed:
        return {}

    # Episodes that were generated ahead are of older weights: the engine scores some again with the current ones.
    if policy.arguments.is_ahead:
        policy.engine.update(policy)
        episodes = replace(episodes, behavior_log_prob=None)
    gaps = ranks.from_main(lambda: engine.gaps(episodes, buffer.log_probs))
    return {f"rollout_info/engine/{name}": value for name, value in gaps.items()}


def update_sampler(rollout: Rollout, vec_env: VecEnv) -> dict[str, float]:
    """Tell the environment's sampler the episodes' total task rewards: it may draw prompts by their difficulty.

    Returns:
        What the sampler and the reward's workers log.
    """
    env: Any = vec_env
    info: dict[str, float] = {}
    restarts = getattr(env, "reward_restarts", None)
    if restarts is not None:
        info["time/reward_restarts"] = restarts

    # Also of prompts whose groups are left out: what the sampler learns is how difficult they are.
    if hasattr(env, "update_sampler"):
        sample_ids: list[str] = []
        for batch in rollout.generated:
            sample_ids += batch.sample_ids
        totals = torch.cat([batch.episode_sums(batch.rewards) for batch in rollout.generated])  # [n_generated]
        logged = env.update_sampler(sample_ids, totals.tolist())
        info |= {f"rollout_info/sampler/{name}": float(value) for name, value in logged.items()}
    return info
