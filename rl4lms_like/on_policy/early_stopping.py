"""End of the training when the score on `val` no longer improves.

    epoch               0     10    20    30    40        patience 2, mode max
    score               0.2   0.5   0.4   NaN   -
    without progress    0     0     1     2 ─ the training ends after 30 iterations

The scores are those of `keep_best`, and a score that is not finite is no progress. The state is part of every
checkpoint, so a resumed run ends where the uninterrupted one does.
"""

from __future__ import annotations

from typing import Any

from rl4lms_like.callbacks.base import Callback
from rl4lms_like.config.rules import EARLY_STOPPING
from rl4lms_like.config.run_config import EarlyStoppingConfig
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.on_policy.best_model import check_has_val, is_better, score_of
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.evaluation import Evaluation


class EarlyStopping(Callback):
    """Counts the evaluations on `val` without a better score.

    Args:
        settings: the metric, and the number of evaluations that it waits.
        run: result of `assemble`.
        tracker: logs the end of the training.

    Attributes:
        is_over: True once the training should end.

    Raises:
        ConfigError: the split `val` has no samples.
    """

    def __init__(self, settings: EarlyStoppingConfig, run: AssembledRun, tracker: Tracker) -> None:
        check_has_val(run, EARLY_STOPPING)
        self.settings = settings
        self.n_iters = run.config.train_evaluation.n_iters
        self.tracker = tracker
        self.epoch: int | None = None  # of the best score
        self.score: float | None = None
        self.n_without_progress = 0

    @property
    def is_over(self) -> bool:
        """True if there was no better score for `patience` evaluations."""
        return self.n_without_progress >= self.settings.patience

    def on_evaluation_end(self, epoch: int, split: str, evaluation: Evaluation) -> None:
        """Compare the score with the best one before.

        Raises:
            ConfigError: no metric reports the key.
        """
        # An evaluation after the end decides nothing.
        if split != "val" or self.is_over:
            return
        score = score_of(evaluation, self.settings.metric, EARLY_STOPPING)
        if score is not None and is_better(score, self.score, self.settings.mode):
            self.epoch = epoch
            self.score = score
            self.n_without_progress = 0
            return

        # Before training there is nothing to improve on yet, also without a score.
        if epoch == 0:
            return
        self.n_without_progress += 1
        if self.is_over and epoch < self.n_iters:
            best = "no score" if self.score is None else f"the best one was {self.score:.4g} after {self.epoch}"
            self.tracker.log_info(
                f"training ends after {epoch} iterations (early_stopping): {self.settings.metric} on val has not "
                f"improved in {self.n_without_progress} evaluations; {best}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.settings.metric,
            "mode": self.settings.mode,
            "epoch": self.epoch,
            "score": self.score,
            "n_without_progress": self.n_without_progress,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The settings may change when a run is resumed: scores of another metric are no scores to improve on.
        if (state["metric"], state["mode"]) != (self.settings.metric, self.settings.mode):
            return
        self.epoch = state["epoch"]
        self.score = state["score"]
        self.n_without_progress = state["n_without_progress"]
