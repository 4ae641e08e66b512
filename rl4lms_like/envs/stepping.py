"""Token-by-token equivalent of `TextVecEnv.play` for any vectorised `TextGenEnv`.

step       0  1  2  3
episode 0  a  b  .  .      . idle token for an environment that is already done; its results are ignored
episode 1  a  b  c  d
"""

from __future__ import annotations

from itertools import count

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.core.errors import RewardError
from rl4lms_like.envs.env import REWARD_PARTS
from rl4lms_like.envs.processes import REWARD_ERROR, EndedError
from rl4lms_like.rewards.call import TokenRewards, texts_to_score


def play_by_stepping(vec_env: VecEnv, episodes: EpisodeBatch) -> TokenRewards:
    """Compute the task rewards of whole responses by stepping a `DummyVecEnv` or `SubprocVecEnv` of `TextGenEnv`.

    The environments reset automatically when they are done, so call `reset` before the next episodes.

    Args:
        vec_env: environments that were just reset; the responses belong to their current prompts.
        episodes: one for each environment, in their order.

    Returns:
        Flat `[n_tokens]` float32, and the contribution of each part of a combined reward, from the steps' `info`.

    Raises:
        ValueError: an episode does not end where its environment does. Stepping cannot compute the final reward of an
            episode that stops before `max_episode_length` without EOS.
        RewardError: the reward failed, or a process of the environments ended.
    """
    samples = vec_env.get_attr("sample")  # fetched first, because environments reset to the next sample when done
    try:
        return _stepped(vec_env, episodes)
    except EndedError:  # the environments cannot be queried any more
        raise
    except RewardError as error:
        responses = [
            ids[mask].tolist() for ids, mask in zip(episodes.response_ids, episodes.response_mask, strict=True)
        ]
        (layout,) = vec_env.get_attr("layout", indices=[0])
        error.texts = texts_to_score(samples, layout.tokenizer.batch_decode(responses, skip_special_tokens=True))
        raise


def _stepped(vec_env: VecEnv, episodes: EpisodeBatch) -> TokenRewards:
    lengths = episodes.lengths.cpu().numpy()
    if len(lengths) != vec_env.num_envs:
        raise ValueError(f"expected {vec_env.num_envs} episodes, one for each environment, got {len(lengths)}")
    responses = episodes.response_ids.cpu().numpy()
    first_tokens = np.cumsum(lengths) - lengths
    end_tokens = vec_env.get_attr("eos_token_ids", indices=[0])[0]
    idle = next(token for token in count() if token not in end_tokens)
    rewards = np.zeros(lengths.sum(), dtype=np.float32)
    parts: dict[str, np.ndarray] = {}
    for step in range(lengths.max()):
        running = step < lengths
        _, paid, dones, infos = vec_env.step(np.where(running, responses[:, step], idle))
        rewards[first_tokens[running] + step] = paid[running]
        for episode in np.flatnonzero(running):
            if REWARD_ERROR in infos[episode]:
                raise RewardError(infos[episode][REWARD_ERROR])
            for name, value in infos[episode].get(REWARD_PARTS, {}).items():
                parts.setdefault(name, np.zeros(len(rewards)))[first_tokens[episode] + step] = value
        _check_ends(running, lengths == step + 1, dones, step + 1)
    return TokenRewards(rewards, parts)


def _check_ends(running: np.ndarray, last: np.ndarray, dones: np.ndarray, n_actions: int) -> None:
    for episode in np.flatnonzero(running & (last != dones)):
        if last[episode]:
            raise ValueError(
                f"episode {episode} stops after {n_actions} tokens, but its environment does not: let generation "
                "continue to max_episode_length or EOS, or use the vectorised environment 'text'"
            )
        raise ValueError(f"episode {episode} continues after {n_actions} tokens, but its environment has ended")
