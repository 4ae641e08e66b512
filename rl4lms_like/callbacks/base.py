"""Base class of callbacks; users derive from it.

    RL run        rollout ─ on_rollout_end ─ update ─ on_iteration_end ─ evaluation? ─ on_evaluation_end ─ on_save?
    offline run                    optimizer step ─ on_iteration_end ─ evaluation? ─ on_evaluation_end ─ on_save?

The best model, early stopping, the run doctor and the credit of tokens are callbacks of RL runs, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunContext:
    """Objects of a run that a callback may read.

    Args:
        config: the run's config; `config.to_dict()` returns it as plain data.
        model: the language model in training, or the reward model, a transformers model.
        tokenizer: encodes prompts and decodes responses.
        folder: the run folder.
        is_main: True in the process that writes files. With several processes, the others are False.
    """

    config: Any
    model: Any
    tokenizer: Any
    folder: Path
    is_main: bool


class Callback:
    """Callback of a run. All methods are optional; the constructor has the `args` of a config.

        class LongestResponse(Callback):
            def on_rollout_end(self, iteration, rollout):
                return {"tokens": int(rollout.episodes.lengths.max())}

    A callback observes a run: it must not change weights or draw from the global random generators, since then the run
    would not be the one that its config describes.

    Attributes:
        run: objects of the run, a `RunContext`; set before the first call.
    """

    run: Any

    def on_rollout_end(self, iteration: int, rollout: Any) -> Mapping[str, float] | None:
        """Called in RL runs after a rollout has its rewards, before the update on it.

        Args:
            iteration: number of the iteration, from 1.
            rollout: the `EpisodeBuffer`: `episodes`, and `rewards`, `episode_rewards` and others `[n_tokens]`.

        Returns:
            Numbers that are logged with those of the iteration, or None.
        """
        return None

    def on_iteration_end(self, iteration: int) -> Mapping[str, float] | None:
        """Called after an update of an RL run, or after an optimizer step of a supervised or preference run.

        Args:
            iteration: number of the iteration or optimizer step, from 1.

        Returns:
            Numbers that are logged with those of the iteration or step, or None.
        """
        return None

    def on_evaluation_end(self, epoch: Any, split: str, evaluation: Any) -> None:
        """Called after a split was evaluated.

        Args:
            epoch: number of completed iterations (RL runs) or passes over the data; 0 before training.
            split: `val` or `test`.
            evaluation: `scores` by metric key, and `predictions`, one dictionary per sample.
        """

    def on_save(self, folder: Path) -> None:
        """Called in the main process after a model or checkpoint was written.

        Args:
            folder: has all files, but still a temporary name. Files that are added become part of it.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state in types that JSON supports; it is part of every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
