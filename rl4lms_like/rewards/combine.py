"""A reward made of others: each part weighted, scored as it works best, and logged on its own.

    combine             parts by hand, `{id, args, weight, name}`
    args.shaping_fn     of any reward in a config: that reward and one more, both with weight 1

Parts may be single-token or batched, terminal or dense, and combinations themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from rl4lms_like.core.observation import Observation
from rl4lms_like.core.wording import InWords
from rl4lms_like.rewards.base import RewardOfParts, RewardPart
from rl4lms_like.rewards.call import is_terminal, score_transition

Part: TypeAlias = Annotated[RewardPart, InWords("a mapping with the keys id, args, weight, name")]


class CombinedReward(RewardOfParts):
    """The weighted sum of other rewards.

    Args:
        rewards: the parts, `{id, args, weight: 1.0, name}`; a name is the id where it is left out, and what the part is
            logged as: `rollout_info/reward/<name>` is what it adds to an episode's reward.
    """

    def __init__(self, rewards: list[Part]) -> None:
        self.parts = tuple(rewards)
        labels = [part.label for part in self.parts]
        if not labels:
            raise ValueError("rewards: there is nothing to combine")
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"rewards: {twice[0]!r} is there more than once; give each part a name of its own")

    @property
    def terminal(self) -> bool:  # type: ignore[override]
        """Whether all parts promise to be 0 before the last token."""
        return all(is_terminal(part.reward) for part in self.parts)

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """The weighted sum for one token."""
        return score_transition(self, prev_observation, action, current_observation, done)


def shaped(reward: Any, name: str, shaping: Any, shaping_name: str) -> CombinedReward:
    """A reward and its shaping function, added; the shaping's name is told apart from an equal one."""
    second = shaping_name if shaping_name != name else f"{shaping_name}_shaping"
    parts: Sequence[RewardPart] = [RewardPart(reward, name=name), RewardPart(shaping, name=second)]
    return CombinedReward(list(parts))
