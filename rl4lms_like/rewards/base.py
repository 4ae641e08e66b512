"""What a user subclasses to say what is good.

RewardFunction          one token at a time: two observations and an action in, one number out
BatchedRewardFunction   a list of texts in, a list of numbers out
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from rl4lms_like.core.observation import Observation


class RewardFunction(ABC):
    """A reward that looks at one transition.

    Attributes:
        terminal: a promise that the reward is 0 while `done` is False. It is then called for last tokens only.
    """

    terminal: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """The reward of one token.

        Args:
            prev_observation: what the policy saw.
            action: the token id that it chose.
            current_observation: prompt and response including that token.
            done: whether the episode ends with it.
            meta_info: the sample's `meta_data`.

        Returns:
            One finite number. Anything else, or an exception, stops the run with a `RewardError`.
        """


class BatchedRewardFunction(ABC):
    """A reward that scores many texts in one call.

    Attributes:
        terminal: a promise that the reward is 0 where `dones` is False. It is then called with finished responses
            only; otherwise with every transition of every episode (`gen_texts` are the texts so far).
    """

    terminal: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        dones: list[bool],
        meta_infos: list[dict[str, Any] | None] | None = None,
    ) -> Sequence[float]:
        """One finite number for each of the `n` entries; all arguments have length `n`."""
