"""Progress of value pretraining (VC-PPO, arXiv 2503.01491): the critic learns the returns of the starting policy.

rollout ─ Monte-Carlo returns ─ explained variance ─ passes of the critic     until it no longer rises

The rollouts and passes are those of `OnPolicyTextAlgorithm.pretrain_critic`.
"""

from __future__ import annotations

import math
from typing import Any

from rl4lms_like.algorithms.arguments import CriticPretraining


class CriticPretrainer:
    """Decides when the critic's pretraining ends, and keeps its progress for checkpoints.

    Args:
        settings: see `CriticPretraining`.

    Attributes:
        explained: explained variance of each rollout's returns, before the critic was trained on it.
    """

    def __init__(self, settings: CriticPretraining) -> None:
        self.settings = settings
        self.explained: list[float] = []

    @property
    def is_over(self) -> bool:
        """True after `max_rollouts`, or if the last `patience` rollouts explained no more than those before."""
        n_done = len(self.explained)
        patience = self.settings.patience
        if n_done >= self.settings.max_rollouts:
            return True
        if n_done <= patience:
            return False

        # A rollout whose returns are all equal has no explained variance (NaN): it is no progress.
        before = [value for value in self.explained[: n_done - patience] if not math.isnan(value)]
        last = [value for value in self.explained[n_done - patience :] if not math.isnan(value)]
        best_before = max(before, default=-math.inf)
        return max(last, default=-math.inf) < best_before + self.settings.min_gain

    def progress(self, explained: float) -> str:
        """Return a line that describes the last rollout."""
        most = self.settings.max_rollouts
        return f"critic, rollout {len(self.explained)} of at most {most}: explained variance {explained:.3f}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the pretraining, in JSON's types."""
        explained: list[float | None] = []
        for value in self.explained:
            explained.append(None if math.isnan(value) else value)  # JSON has no NaN
        return {"explained": explained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.explained = []
        for value in state["explained"]:
            self.explained.append(math.nan if value is None else value)
