"""Weights & Biases sink.

    rollout_info/*, ppo/*, ...              by `iteration`
    <split>/<metric key>                    by `epoch`
    <split>_predictions_at_epoch_<epoch>    a table

With `WANDB_MODE=offline` nothing is sent; `wandb sync <run folder>/wandb/offline-run-...` sends it later. If the
service does not respond, it delays the start of a run by at most 90 s (`WANDB_INIT_TIMEOUT`) and its end by five
minutes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from rl4lms_like.core.errors import import_extra
from rl4lms_like.tracking.run_folder import to_json, write_whole
from rl4lms_like.tracking.sink import Epoch, Predictions, RunDescription, Sink

FINISH_S = 300.0
"""Maximum seconds to wait for uploads at the end of a run; `WANDB_FINISH_TIMEOUT` overrides it."""

ID_FILE = "wandb_run.json"
"""File in the run's folder with the id of the service's run."""


class WandbSink(Sink):
    """Sink that sends a run to Weights & Biases.

    Raises:
        MissingExtraError: the package is not installed.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._wandb = import_extra("wandb", extra="wandb", needed_by="logging to Weights & Biases")
        self._run: Any = None
        self._exit_code = 0

    def open(self, run: RunDescription) -> None:
        """Start a run in the service, or resume that of an interrupted run.

        Values logged after the checkpoint are sent again with the same steps, so that none is missing. Errors of the
        service (no account, no network) are raised.
        """
        id, project = _begun_in(run)
        self._run = self._wandb.init(
            entity=run.entity,
            project=project,
            name=run.experiment,
            config=to_json(run.config),
            dir=str(run.path),
            reinit="create_new",
            **({} if id is None else {"id": id, "resume": "allow", "allow_val_change": True}),
            **self._patience(),
        )
        if id is None:
            own = {"project": run.project, "experiment": run.experiment, "place": _place(run)}
            write_whole(run.path / ID_FILE, json.dumps({"id": self._run.id, **own}) + "\n")
        for group in ("rollout_info", "rollout", "ppo", "train", "time"):
            self._run.define_metric(f"{group}/*", step_metric="iteration")

    def _patience(self) -> dict[str, Any]:
        """Return the timeout at the end of a run as settings; wandb's own default is unlimited."""
        kind = getattr(self._wandb, "Settings", None)
        knows = "finish_timeout" in getattr(kind, "model_fields", ())
        if kind is None or not knows or "WANDB_FINISH_TIMEOUT" in os.environ:
            return {}
        return {"settings": kind(finish_timeout=FINISH_S, finish_timeout_raises=True)}

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

    def ended_early(self, error: BaseException) -> None:
        self._exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1

    def close(self) -> None:
        """Finish the service's run; a run that ended early is marked as failed until it is resumed."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


def _place(run: RunDescription) -> str:
    """Return the path from the project on. Names may contain slashes; `--resume` uses the last two parts as names."""
    return f"{run.project}/" + f"/{run.path.as_posix()}".rpartition(f"/{run.project}/")[2]


def _begun_in(run: RunDescription) -> tuple[str | None, str]:
    """Return the service's id of this folder's run and its project; the id is None for a copied folder."""
    try:
        content = json.loads((run.path / ID_FILE).read_text(encoding="utf-8"))
        id, project, experiment = (content[key] for key in ("id", "project", "experiment"))
        place = content.get("place", f"{project}/{experiment}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None, run.project
    is_own = isinstance(id, str) and isinstance(project, str) and f"/{run.path.as_posix()}".endswith(f"/{place}")
    return (id, project) if is_own else (None, run.project)
