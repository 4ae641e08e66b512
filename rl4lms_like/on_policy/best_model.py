"""The best model of a run so far, by a score on `val`, kept in a folder of its own.

    epoch            0     10    20    30    40
    score (max)      0.2   0.3   NaN   0.3   0.5
    best/                  ●                 ●      written when better than all before; epoch 0 is only the baseline

`best/` can be loaded with `from_pretrained`; `best/best.json` has its epoch and score. The best score is part of every
checkpoint, so a resumed run selects the same model as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl4lms_like.callbacks.base import Callback
from rl4lms_like.config.rules import KEEP_BEST, unknown_metric
from rl4lms_like.on_policy.assemble import AssembledRun
from rl4lms_like.system.disk import saving
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.evaluation import Evaluation
from rl4lms_like.training.resuming.checkpoints import write_folder
from rl4lms_like.training.saved_model import BEST, BEST_FILE


class BestModel(Callback):
    """Keep the model of the best evaluation on `val`; do nothing without `train_evaluation.keep_best`.

    Args:
        run: result of `assemble`.
        tracker: logs which model is kept.
        save_model: writes the model to a folder.

    Raises:
        ConfigError: the split `val` has no samples.
    """

    def __init__(self, run: AssembledRun, tracker: Tracker, save_model: Callable[[Path], Any]) -> None:
        self.run = run
        self.tracker = tracker
        self.save_model = save_model
        self.keep_best = run.config.train_evaluation.keep_best
        self.epoch: int | None = None
        self.score: float | None = None
        if self.keep_best is not None:
            check_has_val(run, KEEP_BEST)

    def on_evaluation_end(self, epoch: int, split: str, evaluation: Evaluation) -> None:
        """Write the model if it is better than all before; NaN, infinities and `n/a` never are.

        Raises:
            ConfigError: no metric reports the key.
            RL4LMsLikeError: the folder cannot be written.
        """
        if self.keep_best is None or split != "val":
            return
        metric = self.keep_best.metric
        mode = self.keep_best.mode
        score = score_of(evaluation, metric, KEEP_BEST)
        if score is None or not is_better(score, self.score, mode):
            return

        # The model before the first iteration is only the baseline: `best/` has one that was trained.
        if epoch:
            with self.run.policy.led_by_main():
                if self.run.ranks.is_main:
                    self._write({"epoch": epoch, "metric": metric, "mode": mode, "score": score})
        self.epoch = epoch
        self.score = score

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "score": self.score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.score = state["score"]

    def _write(self, best: dict[str, Any]) -> None:
        def write(partial: Path) -> None:
            self.save_model(partial)
            (partial / BEST_FILE).write_text(json.dumps(best, indent=1) + "\n", encoding="utf-8")

        folder = self.tracker.run_path / BEST
        with saving(f"the best model to {folder}"):
            write_folder(folder, write)
        self.tracker.log_info(
            f"best on val after {best['epoch']} iterations: {best['metric']} {best['score']:.4g}; saved to {folder}"
        )


def check_has_val(run: AssembledRun, path: str) -> None:
    """Raise a `ConfigError` at a config path that reads scores on `val` if this split has no samples."""
    if not run.samples["val"]:
        message = f"there are no scores: the data pool {run.config.datapool.id!r} has no samples in the split 'val'"
        raise ConfigError([ConfigIssue(path, message)])


def score_of(evaluation: Evaluation, metric: str, path: str) -> float | None:
    """Return the score of a metric that is selected at a config path; None for NaN, infinities and `n/a`.

    Raises:
        ConfigError: no metric reports the key.
    """
    if metric not in evaluation.scores:
        raise ConfigError([unknown_metric(f"{path}.metric", metric, evaluation.scores)])
    score: Any = evaluation.scores[metric]
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        return None
    return float(score)


def is_better(score: float, best: float | None, mode: str) -> bool:
    """Return whether a score is better than the best one before; the first one always is."""
    if best is None:
        return True
    return score > best if mode == "max" else score < best
