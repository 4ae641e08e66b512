"""What a user subclasses to say what is good.

RewardFunction          one token at a time: two observations and an action in, one number out
BatchedRewardFunction   a list of texts in, a list of numbers out
RewardOfParts           others, weighted and added (`combine.CombinedReward`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from annotated_types import MinLen

from rl4lms_like.core.numbers import Finite
from rl4lms_like.core.observation import Observation
from rl4lms_like.core.remembering import load_state, state_of


class RewardFunction(ABC):
    """A reward that looks at one transition.

    Attributes:
        terminal: a promise that the reward is 0 while `done` is False. It is then called for last tokens only.
        needs_references: the reward fails on samples without references; a run whose samples have none is then refused
            before a model is loaded.
    """

    terminal: ClassVar[bool] = False
    needs_references: bool = False

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
        needs_references: the reward fails on samples without references; a run whose samples have none is then refused
            before a model is loaded.
    """

    terminal: ClassVar[bool] = False
    needs_references: bool = False

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


AnyReward: TypeAlias = RewardFunction | BatchedRewardFunction
"""Either kind. A constructor's parameter of this type takes `{id, args}` in a config, and gets the object."""


@dataclass(frozen=True)
class RewardPart:
    """One part of a reward that is made of others; in a config `{id, args, weight, name}`.

    Args:
        reward: the object.
        weight: what its values are multiplied with.
        name: what its share is logged as; default: the id in a config, the class's name in Python.
    """

    reward: AnyReward
    weight: Finite = 1.0
    name: Annotated[str, MinLen(1)] | None = None

    @property
    def label(self) -> str:
        """What the part is called."""
        return self.name or type(self.reward).__name__


class RewardOfParts(RewardFunction):
    """A reward whose value is the weighted sum of others'; `call` asks each of them in the way that it works best.

    Attributes:
        parts: what is added, in this order.
    """

    parts: tuple[RewardPart, ...]

    @property
    def needs_references(self) -> bool:  # type: ignore[override]
        """Return whether one of the parts fails on samples without references."""
        return any(getattr(part.reward, "needs_references", False) for part in self.parts)

    def state_dict(self) -> dict[str, Any]:
        """What the parts remember."""
        return {"parts": [state_of(part.reward) for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            load_state(part.reward, own)
