"""What `TextVecEnv.play` computes, from any vectorised `TextGenEnv`: token by token.

step       0  1  2  3
episode 0  a  b  .  .      . an environment that was done once is fed an idle token; what it returns is ignored
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
from rl4lms_like.rewards.call import TokenRewards
from rl4lms_like.rewards.naming import texts_to_score


def play_by_stepping(vec_env: VecEnv, episodes: EpisodeBatch) -> TokenRewards:
    """Task rewards of whole responses to the current prompts of `DummyVecEnv` or `SubprocVecEnv` of `TextGenEnv`.

    The environments restart on their own when they are done, so call `reset` before the next episodes.

    Args:
        vec_env: just reset.
        episodes: one for each environment, in their order.

    Returns:
        Flat `[n_tokens]` float32, and what each part of a combined reward adds to them, from the steps' `info`.

    Raises:
        ValueError: an episode does not end where its environment does: stepping pays no reward for the end of an
            episode that is cut short of `max_episode_length`.
        RewardError: the reward failed, or a process of the environments ended.
    """
    samples = vec_env.get_attr("sample")  # environments that end go on to their next one
    try:
        return _stepped(vec_env, episodes)
    except EndedError:  # none of the others is asked for anything more
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
                f"episode {episode} stops after {n_actions} tokens, where its environment does not: let generation go "
                "on to max_episode_length or EOS, or use the vectorised environment 'text'"
            )
        raise ValueError(f"episode {episode} goes on after {n_actions} tokens, where its environment has ended")
