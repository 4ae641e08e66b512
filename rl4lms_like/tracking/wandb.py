"""Weights & Biases: what a run looks like there.

    rollout_info/*, ppo/*, ...              against `iteration`
    <split>/<metric key>                    against `epoch`
    <split>_predictions_at_epoch_<epoch>    a table

With `WANDB_MODE=offline` nothing is sent; `wandb sync <run folder>/wandb/offline-run-...` does it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl4lms_like.core.errors import import_extra
from rl4lms_like.tracking.run_folder import to_json
from rl4lms_like.tracking.sink import Epoch, Predictions, RunDescription, Sink


class WandbSink(Sink):
    """Sends a run to Weights & Biases.

    Raises:
        MissingExtraError: if the package is not installed.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._wandb = import_extra("wandb", extra="wandb", needed_by="logging to Weights & Biases")
        self._run: Any = None

    def open(self, run: RunDescription) -> None:
        """Begins a run of its own in the service; raises what the service raises (no account, no network)."""
        self._run = self._wandb.init(
            entity=run.entity,
            project=run.project,
            name=run.experiment,
            config=to_json(run.config),
            dir=str(run.path),
            reinit="create_new",
        )
        for group in ("rollout_info", "rollout", "ppo", "train", "time"):
            self._run.define_metric(f"{group}/*", step_metric="iteration")

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        self._run.log({**values, "iteration": iteration, "timesteps": timesteps})

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        for key in metrics:
            self._run.define_metric(f"{split_name}/{key}", step_metric="epoch")
        self._run.log({"epoch": epoch, **{f"{split_name}/{key}": score for key, score in metrics.items()}})

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        if not predictions:
            return
        columns = list(predictions[0])
        rows = [[to_json(prediction.get(column)) for column in columns] for prediction in predictions]
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({f"{split_name}_predictions_at_epoch_{epoch}": table})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
