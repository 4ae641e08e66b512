"""Diagnostics of a run, and example texts that illustrate them.

    logger      entropy, KL, truncated fraction, value loss, ratio gap ...   ┐
    episodes    relative range of rewards, duplicates and near duplicates,   ├─ {"entropy": 2.1, "kl": 0.04, ...}
                rank correlation of length and reward                        ┘

None stands for a number that is missing or not finite. Only the token ids of the episodes are read, without forward
pass or random numbers; examples are decoded only when an alert is first reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.training.doctor.history import Diagnostics

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
LONGEST = 400
"""Largest number of characters of an example text."""


def diagnostics_of(logged: Mapping[str, Any], episodes: EpisodeBatch, rewards: Sequence[float]) -> Diagnostics:
    """Return the diagnostics of one iteration.

    Args:
        logged: values recorded by the algorithm.
        episodes: the `n` episodes of the rollout.
        rewards: `[n]`, task reward of each episode.
    """
    found = {name: next((_number(logged[key]) for key in keys if key in logged), None) for name, keys in LOGGED.items()}
    lengths, totals = episodes.lengths.cpu().numpy(), np.asarray(rewards, dtype=float)
    found["reward_spread"] = _relative_range(totals)
    found["best_reward"] = _number(totals.max())
    found["empty"] = float(np.mean((lengths <= 1) & episodes.terminated.cpu().numpy()))
    found["duplicates"], found["near_duplicates"] = _duplicates(episodes)
    found["length_correlation"] = rank_correlation(lengths, totals) if len(totals) >= FEWEST_EPISODES else None
    return found


def _number(value: Any) -> float | None:
    """Return a finite number, or None. User-defined algorithms may log values of any type."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _relative_range(rewards: np.ndarray) -> float | None:
    """Return the range of the rewards divided by the largest absolute reward; 0 if all are equal."""
    size = float(np.abs(rewards).max())
    if len(rewards) < 2 or not math.isfinite(size):
        return None
    return float(np.ptp(rewards)) / size if size else 0.0


def _row_numbers(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Number the rows `[n]` so that rows with the same tokens have the same number."""
    rows = torch.where(mask, ids, -1).cpu().numpy()
    return np.asarray(np.unique(rows, axis=0, return_inverse=True)[1]).reshape(-1)


def _duplicates(episodes: EpisodeBatch) -> tuple[float | None, float | None]:
    """Return the fraction of episodes with the most frequent response, and that with a near duplicate.

    The first is 0 if all responses differ. Near duplicates are those of another prompt. None if all prompts are equal.
    """
    prompts = _row_numbers(episodes.prompt_ids, episodes.prompt_mask)
    if not np.ptp(prompts):
        return None, None
    most = int(np.bincount(_row_numbers(episodes.response_ids, episodes.response_mask)).max())
    chosen = _compared(episodes.n_episodes)
    prompts = prompts[chosen]
    near = _near_twins(episodes, chosen) & (prompts[:, None] != prompts[None, :])
    return most / episodes.n_episodes if most > 1 else 0.0, float(near.any(axis=1).mean()) if np.ptp(prompts) else None


def _compared(n_episodes: int) -> np.ndarray:
    """Return the indices of the episodes that are compared pairwise."""
    n = min(n_episodes, N_COMPARED)
    return np.arange(n) * n_episodes // n


def _near_twins(episodes: EpisodeBatch, chosen: np.ndarray) -> np.ndarray:
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
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[numbers.reshape(-1)])


# --- examples --------------------------------------------------------------------------------------------------------


def rollout_examples(
    alert: str, tokenizer: PreTrainedTokenizerBase, episodes: EpisodeBatch, rewards: Sequence[float]
) -> list[dict[str, Any]]:
    """Return episodes of the rollout that illustrate an alert; empty for alerts without examples."""

    def text(ids: torch.Tensor, mask: torch.Tensor, *, skip_special_tokens: bool) -> str:
        return _cut(str(tokenizer.decode(ids[mask].tolist(), skip_special_tokens=skip_special_tokens)))

    return [
        {
            "prompt": text(episodes.prompt_ids[i], episodes.prompt_mask[i], skip_special_tokens=True),
            "response": text(episodes.response_ids[i], episodes.response_mask[i], skip_special_tokens=False),
            "reward": float(rewards[i]),
            "tokens": int(episodes.lengths[i]),
        }
        for i in (_CHOICES[alert](episodes) if alert in _CHOICES else ())
    ]


def evaluation_examples(key: str, mode: str, predictions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the text with the worst score of an evaluation; empty if the metric has no scores of single texts."""
    scored = [item for item in predictions if isinstance(item.get(key), (int, float))]
    worst = (min if mode == "max" else max)(scored, key=lambda item: float(item[key]), default=None)
    if worst is None:
        return []
    prompt, response = _cut(worst["prompt_text"]), _cut(worst["generated_text"])
    return [{"prompt": prompt, "response": response, "score": float(worst[key])}]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _most_alike(episodes: EpisodeBatch) -> list[int]:
    """Return two episodes with the most frequent response or with near duplicates, of different prompts if possible."""
    numbers = _row_numbers(episodes.response_ids, episodes.response_mask)
    prompts = _row_numbers(episodes.prompt_ids, episodes.prompt_mask)
    counts = np.bincount(numbers)
    if counts.max() > 1:
        first, *others = (int(index) for index in np.nonzero(numbers == counts.argmax())[0])
    else:
        chosen = _compared(episodes.n_episodes)
        twins = _near_twins(episodes, chosen)
        most = int(twins.sum(axis=1).argmax())
        first, others = int(chosen[most]), [int(index) for index in chosen[twins[most]] if index != chosen[most]]
    others.sort(key=lambda index: prompts[index] == prompts[first])
    return [first, *others[:1]]


_CHOICES: dict[str, Callable[[EpisodeBatch], list[int]]] = {
    "kl_above_budget": lambda episodes: [0],
    "kl_negative": lambda episodes: [0],
    "entropy_collapse": _most_alike,
    "reward_constant": lambda episodes: [0],
    "all_truncated": lambda episodes: [int((~episodes.terminated).int().argmax())],
    "all_empty": lambda episodes: [int(episodes.lengths.argmin())],
    "duplicates": _most_alike,
    "reward_follows_length": lambda episodes: [int(episodes.lengths.argmin()), int(episodes.lengths.argmax())],
}
"""Alert -> indices of the episodes that illustrate it."""
