"""Diagnostics of an iteration: logged values, and numbers computed from its episodes.

    logger      entropy, KL, truncated fraction, value loss, ratio gap ...   ┐
    episodes    relative range of rewards, duplicates and near duplicates,   ├─ {"entropy": 2.1, "kl": 0.04, ...}
                rank correlation of length and reward                        ┘

None stands for a number that is missing or not finite. Only the token ids of the episodes are read, without forward
pass, decoding or random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl4lms_like.core.episodes import EpisodeBatch

Signs = dict[str, float | None]
"""Diagnostics of one iteration, and its number as `iteration`."""

LOGGED: dict[str, tuple[str, ...]] = {
    "reward": ("rollout_info/ep_rew",),
    "reward_std": ("rollout_info/ep_rew_std",),
    "n_episodes": ("rollout_info/n_episodes",),
    "kl_reward": ("rollout_info/ep_kl_rew",),
    "kl_reward_std": ("rollout_info/ep_kl_rew_std",),
    "length": ("rollout_info/ep_lens",),
    "truncated": ("rollout_info/truncated_share",),
    "entropy": ("rollout_info/entropy",),
    "kl": ("rollout_info/kl_div_mean",),
    "value_loss": ("ppo/value_loss", "train/value_loss"),
    "explained_variance": ("ppo/explained_variance", "train/explained_variance"),
    "approx_kl": ("trpo/kl", "ppo/approx_kl", "train/approx_kl"),
    "clip_fraction": ("ppo/clip_fraction", "train/clip_fraction"),
    "ratio_gap": ("train/ratio_gap",),
    "grad_norm": ("train/grad_norm",),
    "minibatch_episodes": ("train/minibatch_episodes",),
    "optimizer_steps": ("train/optimizer_steps",),
    "skipped_steps": ("train/skipped_steps",),
    "step_taken": ("trpo/line_search_success",),
}
"""Diagnostic -> logged keys, by priority: exact before estimated, ours before those of Stable-Baselines3."""

N_COMPARED = 64
"""Largest number of episodes that are compared pairwise; of more, an evenly spaced subset is used."""
NEARLY = 0.8
"""Jaccard similarity of the token bigrams of two responses from which they are near duplicates."""
FEWEST_EPISODES = 8
"""Smallest number of episodes for conclusions from one rollout. Fewer have equal or ordered rewards by chance."""


def signs_of(logged: Mapping[str, Any], episodes: EpisodeBatch, rewards: Sequence[float]) -> Signs:
    """Return the diagnostics of one iteration.

    Args:
        logged: values recorded by the algorithm.
        episodes: the `n` episodes of the rollout.
        rewards: `[n]`, task reward of each episode.
    """
    signs = {name: _first(logged, keys) for name, keys in LOGGED.items()}
    lengths = episodes.lengths.cpu().numpy()
    totals = np.asarray(rewards, dtype=float)
    signs["reward_spread"] = spread(totals)
    signs["best_reward"] = _number(totals.max())
    signs["empty"] = float(np.mean((lengths <= 1) & episodes.terminated.cpu().numpy()))
    prompts = row_numbers(episodes.prompt_ids, episodes.prompt_mask)
    signs["duplicates"] = duplicate_share(episodes, prompts)
    signs["near_duplicates"] = near_duplicate_share(episodes, prompts)
    signs["length_correlation"] = rank_correlation(lengths, totals) if len(totals) >= FEWEST_EPISODES else None
    return signs


def _first(logged: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    return next((_number(logged[key]) for key in keys if key in logged), None)


def _number(value: Any) -> float | None:
    """Return a finite number, or None. User-defined algorithms may log values of any type."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def spread(rewards: np.ndarray) -> float | None:
    """Return the range of the rewards divided by the largest absolute reward; 0 if all are equal."""
    if len(rewards) < 2:
        return None
    size = float(np.abs(rewards).max())
    if not math.isfinite(size):
        return None
    return float(np.ptp(rewards)) / size if size else 0.0


def row_numbers(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Number the rows `[n]` so that rows with the same tokens have the same number."""
    rows = torch.where(mask, ids, -1).cpu().numpy()
    numbers = np.unique(rows, axis=0, return_inverse=True)[1]
    return np.asarray(numbers).reshape(-1)


def duplicate_share(episodes: EpisodeBatch, prompts: np.ndarray) -> float | None:
    """Return the fraction of episodes with the most frequent response; 0 if all differ, None if all prompts are equal.

    Args:
        episodes: `n` episodes.
        prompts: `[n]`, a number for each prompt.
    """
    if not np.ptp(prompts):
        return None
    most = int(np.bincount(row_numbers(episodes.response_ids, episodes.response_mask)).max())
    return most / episodes.n_episodes if most > 1 else 0.0


def near_duplicate_share(episodes: EpisodeBatch, prompts: np.ndarray) -> float | None:
    """Return the fraction of responses with a near duplicate of another prompt; None if all prompts are equal.

    Args:
        episodes: `n` episodes.
        prompts: `[n]`, a number for each prompt.
    """
    chosen = compared(episodes.n_episodes)
    prompts = prompts[chosen]
    if len(set(prompts.tolist())) < 2:
        return None
    twins = near_twins(episodes, chosen) & (prompts[:, None] != prompts[None, :])
    return float(twins.any(axis=1).mean())


def compared(n_episodes: int) -> np.ndarray:
    """Return the indices of the episodes that are compared pairwise."""
    if n_episodes <= N_COMPARED:
        return np.arange(n_episodes)
    return np.arange(N_COMPARED) * n_episodes // N_COMPARED


def near_twins(episodes: EpisodeBatch, chosen: np.ndarray) -> np.ndarray:
    """Return which of the chosen responses are near duplicates, `[k, k]`, by Jaccard similarity of their bigrams."""
    index = torch.as_tensor(chosen, device=episodes.response_ids.device)
    ids = episodes.response_ids[index].cpu().numpy()
    mask = episodes.response_mask[index].cpu().numpy()
    pairs = ids[:, :-1] * (int(ids.max(initial=0)) + 1) + ids[:, 1:]
    rows, columns = np.nonzero(mask[:, 1:])
    kinds, numbers = np.unique(pairs[rows, columns], return_inverse=True)
    has = np.zeros((len(chosen), len(kinds)), dtype=np.float32)
    has[rows, numbers.reshape(-1)] = 1
    shared, sizes = has @ has.T, has.sum(axis=1)
    union = sizes[:, None] + sizes[None, :] - shared
    return np.asarray((shared >= NEARLY * union) & (shared > 0))


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Return Spearman's rho with ties at their mean rank; None if one of the two is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[numbers.reshape(-1)])
