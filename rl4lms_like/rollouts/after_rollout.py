"""Consumers of a rollout whose rewards are in the buffer, and the numbers that they log.

engine_gaps       log-probs of an external engine against the policy's      rollout_info/engine/...
update_sampler    rewards of the episodes for the sampler of the prompts    rollout_info/sampler/...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.sampled_log_probs import UNSURE
from rl4lms_like.policies.base import LMActorCriticPolicy
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.rollout import Rollout
from rl4lms_like.system.errors import EngineError
from rl4lms_like.system.ranks import Ranks


def engine_gaps(
    rollout: Rollout,
    buffer: EpisodeBuffer,
    policy: LMActorCriticPolicy,
    ranks: Ranks,
    *,
    eos_token_ids: Sequence[int],
    max_new_tokens: int,
) -> dict[str, float]:
    """Return how far an external engine's log-probs differ from those that are trained, which are the policy's own.

    There is nothing to compare without an external engine, or if it has not generated the rollout.

    Raises:
        EngineError: they differ by more than the engine's limit, or are 0 where the policy is not sure.
    """
    engine = policy.engine.external
    episodes = buffer.episodes
    if engine is None or episodes is None or rollout.is_replayed:
        return {}
    if engine.samples_policy:
        _check_certain_tokens(episodes, buffer.log_probs, policy, eos_token_ids, max_new_tokens)

    # Episodes that were generated ahead are of older weights: the engine scores some again with the current ones.
    if policy.arguments.is_ahead:
        policy.engine.pass_on(policy)
        episodes = replace(episodes, behavior_log_prob=None)
    gaps = ranks.from_main(lambda: engine.gaps(episodes, buffer.log_probs))
    return {f"rollout_info/engine/{name}": value for name, value in gaps.items()}


def _check_certain_tokens(
    episodes: EpisodeBatch,
    log_prob: Tensor,
    policy: LMActorCriticPolicy,
    eos_token_ids: Sequence[int],
    max_new_tokens: int,
) -> None:
    """Raise an `EngineError` if an engine gave a token the log-prob 0 of which the policy is not sure.

    Such zeros are those of a server that does not compute log-probs; as probabilities of the sampling they would be
    used to correct the loss.

    Args:
        episodes: of a rollout of this engine.
        log_prob: `[n_tokens]`, of the policy with its current weights, at temperature 1.
        policy: the policy.
        eos_token_ids: tokens that end a response.
        max_new_tokens: the environment's limit.
    """
    sampled = episodes.behavior_log_prob
    if sampled is None:
        return
    is_zero = sampled == 0  # [n_tokens]
    suspects = episodes.pad(is_zero.float()).any(dim=1).nonzero().squeeze(1)  # episodes with a zero

    # Episode by episode: the logits of all actions of a rollout may not fit into memory.
    for episode in suspects:
        tokens = episodes.token_index(episode.reshape(1))
        under_policy = log_prob[tokens]
        if policy.samples_other_distribution:
            chosen = episodes.select(episode.reshape(1))
            under_policy = policy.generation_log_prob(
                chosen, eos_token_ids=eos_token_ids, max_new_tokens=max_new_tokens
            )
        is_wrong = is_zero[tokens] & (under_policy < UNSURE)
        if bool(is_wrong.any()):
            position = int(is_wrong.nonzero()[0])
            assert policy.engine.external is not None
            token = f"token {position} of response {int(episode)}"
            raise EngineError(
                f"{policy.engine.external.name} returned the log-prob 0 of {token}, which the policy samples "
                f"with {float(under_policy[position]):.3g}: the server computes no log-probs of sampled tokens, or "
                f"those of another distribution"
            )


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
