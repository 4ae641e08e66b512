"""Example texts of alerts, decoded only when an alert is first reported.

{"prompt": ..., "response": ..., "reward": ..., "tokens": ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl4lms_like.core.episodes import EpisodeBatch
from rl4lms_like.training.doctor.signs import compared, near_twins, row_numbers

LONGEST = 400
"""Largest number of characters of a text."""

Example = dict[str, Any]


def rollout_examples(
    alarm: str, tokenizer: PreTrainedTokenizerBase, episodes: EpisodeBatch, rewards: Sequence[float]
) -> list[Example]:
    """Return episodes of the rollout that illustrate an alert; empty for alerts without examples."""
    if alarm not in _CHOICES:
        return []
    chosen = _CHOICES[alarm](episodes)
    return [
        {
            "prompt": _text(tokenizer, episodes.prompt_ids[index], episodes.prompt_mask[index], special=False),
            "response": _text(tokenizer, episodes.response_ids[index], episodes.response_mask[index], special=True),
            "reward": float(rewards[index]),
            "tokens": int(episodes.lengths[index]),
        }
        for index in chosen
    ]


def evaluation_examples(key: str, mode: str, predictions: Sequence[Mapping[str, Any]]) -> list[Example]:
    """Return the text with the worst score of an evaluation; empty if the metric has no scores of single texts."""
    scored = [item for item in predictions if isinstance(item.get(key), (int, float))]
    if not scored:
        return []
    worst = (min if mode == "max" else max)(scored, key=lambda item: float(item[key]))
    return [{"prompt": cut(worst["prompt_text"]), "response": cut(worst["generated_text"]), "score": float(worst[key])}]


def cut(text: str) -> str:
    """Truncate a text to `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _text(tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, mask: torch.Tensor, *, special: bool) -> str:
    return cut(str(tokenizer.decode(ids[mask].tolist(), skip_special_tokens=not special)))


def _first(episodes: EpisodeBatch) -> list[int]:
    return [0]


def _first_cut(episodes: EpisodeBatch) -> list[int]:
    return [int((~episodes.terminated).int().argmax())]


def _shortest(episodes: EpisodeBatch) -> list[int]:
    return [int(episodes.lengths.argmin())]


def _most_alike(episodes: EpisodeBatch) -> list[int]:
    """Return two episodes with the most frequent response or with near duplicates, of different prompts if possible."""
    numbers = row_numbers(episodes.response_ids, episodes.response_mask)
    prompts = row_numbers(episodes.prompt_ids, episodes.prompt_mask)
    counts = np.bincount(numbers)
    if counts.max() > 1:
        first, *others = (int(index) for index in np.nonzero(numbers == counts.argmax())[0])
    else:
        chosen = compared(episodes.n_episodes)
        twins = near_twins(episodes, chosen)
        most = int(twins.sum(axis=1).argmax())
        first, others = int(chosen[most]), [int(index) for index in chosen[twins[most]] if index != chosen[most]]
    others.sort(key=lambda index: prompts[index] == prompts[first])
    return [first, *others[:1]]


def _shortest_and_longest(episodes: EpisodeBatch) -> list[int]:
    lengths = episodes.lengths
    return [int(lengths.argmin()), int(lengths.argmax())]


_CHOICES = {
    "kl_above_budget": _first,
    "kl_negative": _first,
    "entropy_collapse": _most_alike,
    "reward_constant": _first,
    "all_truncated": _first_cut,
    "all_empty": _shortest,
    "duplicates": _most_alike,
    "reward_follows_length": _shortest_and_longest,
}
