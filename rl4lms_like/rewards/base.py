"""Base classes of reward functions: called for one token (`RewardFunction`) or many texts (`BatchedRewardFunction`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from annotated_types import MinLen

from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import Observation
from rl4lms_like.system.component_state import load_state, state_of
from rl4lms_like.system.numbers import Finite


class RewardFunction(ABC):
    """Reward computed from one transition.

    Attributes:
        terminal: True declares that the reward is 0 while `done` is False. It is then called for last tokens only.
        needs_references: True if the reward fails on samples without references. A run whose samples have none then
            stops with an error before a model is loaded.
        is_local: False if it calls a server or a paid service. Evaluations then compute it only if the config lists it.

    Examples:
        >>> class ShortAnswer(RewardFunction):
        ...     terminal = True
        ...
        ...     def __call__(self, prev_observation, action, current_observation, done, meta_info=None):
        ...         n_words = len(current_observation.context_text.split())
        ...         return 1.0 if done and n_words <= 20 else 0.0
    """

    terminal: ClassVar[bool] = False
    needs_references: bool = False
    is_local: bool = True

    @abstractmethod
    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the reward of one token.

        Args:
            prev_observation: the observation before the token.
            action: the token id chosen by the policy.
            current_observation: prompt and response including that token.
            done: True if the episode ends with this token.
            meta_info: the sample's `meta_data`.

        Returns:
            One finite number. Any other value, or an exception, stops the run with a `RewardError`.
        """


class BatchedRewardFunction(ABC):
    """Reward that scores many texts in one call.

    Attributes:
        terminal: True declares that the reward is 0 where `dones` is False. It is then called with finished responses
            only. Otherwise it is called with every transition of every episode; `gen_texts` are the texts so far.
        needs_references: True if the reward fails on samples without references. A run whose samples have none then
            stops with an error before a model is loaded.
        is_local: False if it calls a server or a paid service. Evaluations then compute it only if the config lists it.

    Examples:
        >>> class FullStop(BatchedRewardFunction):
        ...     terminal = True
        ...
        ...     def __call__(self, prompt_texts, gen_texts, ref_texts, dones, meta_infos=None):
        ...         return [float(done and text.endswith(".")) for text, done in zip(gen_texts, dones)]
        >>> FullStop()(["Why?"] * 2, ["It is so.", "It"], [[], []], [True, True])
        [1.0, 0.0]
    """

    terminal: ClassVar[bool] = False
    needs_references: bool = False
    is_local: bool = True

    @abstractmethod
    def __call__(
        self,
        prompt_texts: list[str],
        gen_texts: list[str],
        ref_texts: list[list[str]],
        dones: list[bool],
        meta_infos: list[dict[str, Any] | None] | None = None,
    ) -> Sequence[float]:
        """Return one finite number for each of the `n` entries; all arguments have length `n`."""


class GeneratedReward(BatchedRewardFunction):
    """Terminal reward that reads more of a finished response than its text: messages and pictures, token ids."""

    terminal = True

    @abstractmethod
    def scores_of(self, generated: Sequence[Generated]) -> Sequence[float]:
        """Return one finite number for each of the `n` finished responses."""


class EpisodeReward(RewardFunction):
    """Reward of several tokens of a finished response, computed for many responses in one call.

    Unless it is `terminal`, tokens before the last one have rewards that are known only when the response is finished:
    such a reward cannot be computed token by token.
    """

    @abstractmethod
    def rewards_of(self, episodes: Sequence[Observation]) -> Sequence[Sequence[float]]:
        """Return the rewards of `n` finished responses, each with one finite number for each of its tokens."""


AnyReward: TypeAlias = RewardFunction | BatchedRewardFunction
"""Either kind of reward. For a constructor parameter of this type, a config gives `{id, args}` of the reward."""


@dataclass(frozen=True)
class RewardPart:
    """One term of a weighted sum of rewards; in a config `{id, args, weight, name}`.

    Args:
        reward: the reward function.
        weight: factor of its values.
        name: name under which its contribution is logged; default: the id in a config, the class name in Python.
    """

    reward: AnyReward
    weight: Finite = 1.0
    name: Annotated[str, MinLen(1)] | None = None

    @property
    def label(self) -> str:
        """Name of the part in logs and errors."""
        return self.name or type(self.reward).__name__


class RewardOfParts(RewardFunction):
    """Weighted sum of other rewards; each part is called in its own way, per token or batched (see `call`).

    Attributes:
        parts: the terms of the sum, in this order.
    """

    parts: tuple[RewardPart, ...]

    @property
    def needs_references(self) -> bool:  # type: ignore[override]
        """True if one of the parts fails on samples without references."""
        # By `getattr`, because in Python a part may be any callable with the signature of a reward.
        return any(getattr(part.reward, "needs_references", False) for part in self.parts)

    @property
    def is_local(self) -> bool:  # type: ignore[override]
        """False if one of the parts calls a server or a paid service."""
        return all(getattr(part.reward, "is_local", True) for part in self.parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts."""
        return {"parts": [state_of(part.reward) for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        for part, part_state in zip(self.parts, state["parts"], strict=True):
            load_state(part.reward, part_state)


def inner_rewards(reward: Any) -> Iterator[Any]:
    """Yield a reward and all rewards that it is made of: the parts of a sum, and the attributes of a wrapper."""
    yield reward
    inner = [part.reward for part in reward.parts] if isinstance(reward, RewardOfParts) else []
    if isinstance(reward, RewardFunction | BatchedRewardFunction):
        inner += [item for item in vars(reward).values() if isinstance(item, RewardFunction | BatchedRewardFunction)]
    for item in inner:
        yield from inner_rewards(item)
