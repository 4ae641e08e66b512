"""Penalties for long and for repetitive responses, to be used as parts of `combine` or as a `shaping_fn`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Le

from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.text import LastTokenReward, ScoreReward
from rl4lms_like.scoring.bleu import ngrams
from rl4lms_like.scoring.score import Texts
from rl4lms_like.system.numbers import Count, NonNegative, Whole


@dataclass(eq=False)
class LengthPenalty(LastTokenReward):
    """Penalty for every unit by which the finished response exceeds `max_length`.

    Args:
        max_length: length up to which there is no penalty.
        unit: `words` (separated by whitespace), `characters`, or `tokens` of the policy, including the end token.
        penalty: penalty per additional unit.
        min_reward: lower bound of the reward.
    """

    max_length: Whole
    unit: Literal["tokens", "words", "characters"] = "words"
    penalty: NonNegative = 0.01
    min_reward: Annotated[float, Le(0)] = -1.0

    def score(self, observation: Observation) -> float:
        # Only the tokens include the end token: the text is decoded without special tokens.
        if self.unit == "tokens":
            length = observation.n_actions
        elif self.unit == "words":
            length = len(observation.context_text.split())
        else:
            length = len(observation.context_text)
        return self.of_length(length)

    def of_length(self, length: int) -> float:
        """Return the reward of a response of that length."""
        excess = max(0, length - self.max_length)
        return max(self.min_reward, 0.0 - self.penalty * excess)


class SoftOverlong(LastTokenReward):
    """0 for short responses, then linear down to -1 at the length limit (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        max_length: tokens, including the end token; longer responses get -1. Usually `max_episode_length`.
        cache: number of tokens before `max_length` over which the penalty grows from 0 to 1.
    """

    def __init__(self, max_length: Count, cache: Count) -> None:
        if cache > max_length:
            raise ValueError(f"cache is {cache}, which exceeds max_length, {max_length}")
        self.max_length = max_length
        self.cache = cache

    def score(self, observation: Observation) -> float:
        return self.of_length(observation.n_actions)

    def of_length(self, length: int) -> float:
        """Return 0 up to L_max - L_cache, ((L_max - L_cache) - L) / L_cache up to L_max, else -1."""
        free_length = self.max_length - self.cache
        if length <= free_length:
            return 0.0
        if length <= self.max_length:
            return (free_length - length) / self.cache
        return -1.0


@dataclass(eq=False)
class RepetitionPenalty(ScoreReward):
    """Penalty of `max_penalty` times the fraction of the response's n-grams that repeat an earlier one, as in open-r1.

    Words are separated by white space and lower-cased.

    Args:
        ngram_size: words per n-gram; shorter responses get 0.
        max_penalty: reward in the limit of a response that consists of repetitions only.
    """

    ngram_size: Count = 3
    max_penalty: Annotated[float, Le(0)] = -1.0

    def per_text(self, texts: Texts) -> list[float]:
        return [self._of_words(response.lower().split()) for response in texts.responses]

    def _of_words(self, words: list[str]) -> float:
        grams = list(ngrams(words, self.ngram_size))
        if not grams:
            return 0.0

        # (1 - distinct / all n-grams) x max_penalty. The added 0 turns a reward of -0.0 (no repetition) into 0.0.
        repeated = 1 - len(set(grams)) / len(grams)
        return repeated * self.max_penalty + 0.0
