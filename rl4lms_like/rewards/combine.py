"""Weighted sum of other rewards, with each part logged separately.

Parts may be single-token or batched, terminal or dense, or combinations themselves.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from rl4lms_like.core.observation import Observation
from rl4lms_like.rewards.base import RewardOfParts, RewardPart
from rl4lms_like.rewards.call import is_terminal, score_transition
from rl4lms_like.system.wording import InWords

Part: TypeAlias = Annotated[RewardPart, InWords("a mapping with the keys id, args, weight, name")]


class CombinedReward(RewardOfParts):
    """Weighted sum of other rewards.

    Args:
        rewards: the parts, `{id, args, weight: 1.0, name}`. The name defaults to the id. The contribution of a part to
            the episode reward is logged as `rollout_info/reward/<name>`.
    """

    def __init__(self, rewards: list[Part]) -> None:
        self.parts = tuple(rewards)
        labels = [part.label for part in self.parts]
        if not labels:
            raise ValueError("rewards: the list is empty, so there is nothing to combine")

        # A label is the key under which a part is logged: two parts of one label would be logged as one.
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        if repeated:
            raise ValueError(f"rewards: {repeated[0]!r} occurs more than once; give each part a distinct name")

    @property
    def terminal(self) -> bool:  # type: ignore[override]
        """True if all parts are 0 before the last token."""
        return all(is_terminal(part.reward) for part in self.parts)

    def __call__(
        self,
        prev_observation: Observation,
        action: int,
        current_observation: Observation,
        done: bool,
        meta_info: dict[str, Any] | None = None,
    ) -> float:
        """Return the weighted sum for one token."""
        # A run does not call the sum but its parts, each with all texts of a batch (`call.score_episodes_in_parts`).
        return score_transition(self, prev_observation, action=action, current=current_observation, done=done)


def shaped(reward: Any, name: str, shaping: Any, shaping_name: str) -> CombinedReward:
    """Return the sum of a reward and its `shaping_fn`; a shaping function of the same name gets a suffix."""
    if shaping_name == name:
        shaping_name = f"{shaping_name}_shaping"
    return CombinedReward([RewardPart(reward, name=name), RewardPart(shaping, name=shaping_name)])
