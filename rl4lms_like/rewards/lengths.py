"""Penalties for long and for repetitive responses, to be used as parts of `combine` or as a `shaping_fn`."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Le

from rl4lms_like.core.numbers import Count, NonNegative, Whole
from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import RewardFunction
from rl4lms_like.rewards.text import TextReward
from rl4lms_like.scoring.lengths import Unit, length_of, length_penalty, repetition_penalty, soft_overlong


class LengthPenalty(RewardFunction):
    """Penalty for every unit by which the finished response exceeds `max_length`.

    Args:
        max_length: length up to which there is no penalty.
        unit: `words` (separated by whitespace), `characters`, or `tokens` of the policy, including the end token.
        penalty: penalty per additional unit.
        min_reward: lower bound of the reward.
    """

    terminal = True

    def __init__(
        self,
        max_length: Whole,
        unit: Unit = "words",
        penalty: NonNegative = 0.01,
        min_reward: Annotated[float, Le(0)] = -1.0,
    ) -> None:
        self.max_length, self.unit = max_length, unit
        self.penalty, self.min_reward = penalty, min_reward

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the reward at the last token, 0 before."""
        if not done:
            return 0.0
        seen = current_observation
        length = seen.n_actions if self.unit == "tokens" else length_of(seen.context_text, self.unit)
        return length_penalty(length, max_length=self.max_length, penalty=self.penalty, min_reward=self.min_reward)


class SoftOverlong(RewardFunction):
    """0 for short responses, then linear down to -1 at the length limit (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        max_length: tokens, including the end token; longer responses get -1. Usually `max_episode_length`.
        cache: number of tokens before `max_length` over which the penalty grows from 0 to 1.
    """

    terminal = True

    def __init__(self, max_length: Count, cache: Count) -> None:
        if cache > max_length:
            raise ValueError(f"cache is {cache}, which exceeds max_length, {max_length}")
        self.max_length, self.cache = max_length, cache

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the reward at the last token, 0 before."""
        if not done:
            return 0.0
        return soft_overlong(current_observation.n_actions, max_length=self.max_length, cache=self.cache)


class RepetitionPenalty(TextReward):
    """Penalty of `max_penalty` times the fraction of the response's n-grams that repeat an earlier one.

    Args:
        ngram_size: words per n-gram; shorter responses get 0.
        max_penalty: reward in the limit of a response that consists of repetitions only.
    """

    def __init__(self, ngram_size: Count = 3, max_penalty: Annotated[float, Le(0)] = -1.0) -> None:
        self.ngram_size, self.max_penalty = ngram_size, max_penalty

    def scores(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        meta_infos: list[dict[str, Any] | None],
    ) -> list[float]:
        return [
            repetition_penalty(text, ngram_size=self.ngram_size, max_penalty=self.max_penalty) for text in gen_texts
        ]
