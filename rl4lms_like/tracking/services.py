"""Connections to other software, imported only if a run uses it.

Stable-Baselines3, TensorBoard, Weights & Biases, Trackio:

algorithm.logger.record("ppo/value_loss", ...)   any number of times
algorithm.logger.dump(step=num_timesteps)        once per iteration -> TrackerWriter.write -> all sinks
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from stable_baselines3.common.logger import HumanOutputFormat, KVWriter, Logger, TensorBoardOutputFormat

from rl4lms_like.system.errors import RL4LMsLikeError, import_extra
from rl4lms_like.system.regular_files import read_json
from rl4lms_like.tracking.run_folder import to_json, write_whole
from rl4lms_like.tracking.sink import Epoch, Predictions, RunDescription, Sink

N_TEXTS = 5  # number of texts of an evaluation in TensorBoard
FINISH_S = 300.0
"""Maximum seconds to wait for Weights & Biases at the end of a run; `WANDB_FINISH_TIMEOUT` overrides it."""

ID_FILE = "wandb_run.json"  # file in the run's folder with the id of the run in Weights & Biases
TRACKIO_FILE = "trackio_run.json"  # the same for Trackio


class Destination(Protocol):
    """The tracker, as Stable-Baselines3's logger needs it."""

    run_path: Path

    def log_values(self, values: Mapping[str, Any], *, timesteps: int, excluded: Mapping[str, Any]) -> None:
        """Log values with the number of tokens so far."""

    def print(self, text: str) -> None:
        """Print a text above the live display."""


class TrackerWriter(KVWriter):
    """Writer that passes the dumps of SB3's logger to a tracker, so that algorithms do not depend on the tracker."""

    def __init__(self, tracker: Destination) -> None:
        self.tracker = tracker

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Pass the values to the tracker; `key_excluded` maps a key to the sinks that do not receive it."""
        self.tracker.log_values(dict(key_values), timesteps=step, excluded=dict(key_excluded))

    def close(self) -> None:
        """Do nothing: the tracker closes its own sinks."""


def make_logger(tracker: Destination, *, verbose: int = 0) -> Logger:
    """Return a logger whose dumps go to the tracker; with `verbose` they are also printed as SB3's table."""
    writers: list[KVWriter] = [TrackerWriter(tracker)]

    # SB3's table through the tracker, which prints it above the live display.
    if verbose:
        stream: Any = SimpleNamespace(write=lambda text: tracker.print(text.rstrip("\n")), flush=lambda: None)
        writers.append(HumanOutputFormat(stream, max_length=50))

    return Logger(folder=str(tracker.run_path), output_formats=writers)


class TensorBoardSink(Sink):
    """Sink for event files: iterations by tokens, evaluations by epoch. It uses SB3's writer, and supports its figures.

    Files are written to `<folder>/<experiment>`. If the package is not installed, a `MissingExtraError` is raised.
    """

    name = "tensorboard"

    def __init__(self, folder: str | Path) -> None:
        import_extra("tensorboard", extra="tensorboard", needed_by="tensorboard_log")
        self.folder = Path(folder)
        self._output: Any = None

    def open(self, run: RunDescription) -> None:
        """Open the event file."""
        self._output = TensorBoardOutputFormat(str(self.folder / run.experiment))

        # The package writes in a thread of its own, whose failure Python would print with a traceback.
        self._hook = threading.excepthook
        threading.excepthook = self._thread_failed

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        # SB3's writer expects the excluded formats of each key: none here, since the tracker has left those out.
        numbers = {**values, "iteration": iteration}
        self._output.write(numbers, {key: ("",) for key in numbers}, timesteps)
        self._output.writer.flush()

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        for key, score in metrics.items():
            if not isinstance(score, str):
                self._output.writer.add_scalar(f"{split_name}/{key}", score, int(epoch))
        self._output.writer.flush()

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        for row, prediction in enumerate(predictions[:N_TEXTS]):
            text = f"**{prediction.get('prompt_text', '')}**\n\n{prediction.get('generated_text', '')}"
            self._output.writer.add_text(f"{split_name}_predictions/{row}", text, int(epoch))

    def close(self) -> None:
        if self._output is not None:
            threading.excepthook = self._hook
            self._output.close()

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Silence exceptions of the writer's thread, since the next event raises the same error."""
        if not str(getattr(type(failure.thread), "__module__", "")).startswith("tensorboard."):
            self._hook(failure)


class WandbSink(Sink):
    """Sink that sends a run to Weights & Biases: iterations by `iteration`, scores by `epoch`, and tables of texts.

    With `WANDB_MODE=offline` nothing is sent; `wandb sync <run folder>/wandb/offline-run-...` sends it later. If the
    service does not respond, it delays the start of a run by at most 90 s (`WANDB_INIT_TIMEOUT`) and its end by five
    minutes. If the package is not installed, a `MissingExtraError` is raised.

    Args:
        project: project in the service; default: that of the run.
    """

    name = "wandb"

    def __init__(self, project: str | None = None) -> None:
        self._project = project
        self._wandb = import_extra("wandb", extra="wandb", needed_by="logging to Weights & Biases")
        self._run: Any = None
        self._exit_code = 0

    def open(self, run: RunDescription) -> None:
        """Start a run in the service, or resume that of an interrupted run.

        Values logged after the checkpoint are sent again with the same steps, so that none is missing. Errors of the
        service (no account, no network) are raised.
        """
        run_id, project = _id_of(run, ID_FILE)
        options: dict[str, Any] = {}
        if run_id is None:
            project = self._project or project
        else:
            options = {"id": run_id, "resume": "allow", "allow_val_change": True}

        # wandb's own timeout at the end of a run is unlimited. Older versions do not have the setting.
        settings = getattr(self._wandb, "Settings", None)
        if "finish_timeout" in getattr(settings, "model_fields", ()) and "WANDB_FINISH_TIMEOUT" not in os.environ:
            options["settings"] = self._wandb.Settings(finish_timeout=FINISH_S, finish_timeout_raises=True)

        # "create_new": several runs in one process do not end each other.
        self._run = self._wandb.init(
            entity=run.entity,
            project=project,
            name=run.experiment,
            config=to_json(run.config),
            dir=str(run.path),
            reinit="create_new",
            **options,
        )

        if run_id is None:
            _write_id(run, ID_FILE, self._run.id, project)
        for group in ("rollout_info", "rollout", "ppo", "train", "time"):
            self._run.define_metric(f"{group}/*", step_metric="iteration")

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        self._run.log({**values, "iteration": iteration, "timesteps": timesteps})

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        for key in metrics:
            self._run.define_metric(f"{split_name}/{key}", step_metric="epoch")
        scores = {f"{split_name}/{key}": score for key, score in metrics.items()}
        self._run.log({"epoch": epoch, **scores})

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        self._log_table(f"{split_name}_predictions_at_epoch_{epoch}", predictions)

    def log_responses(self, epoch: Epoch, responses: Predictions) -> None:
        self._log_table(f"rollout_responses_at_epoch_{epoch}", responses)

    def _log_table(self, name: str, texts: Predictions) -> None:
        if texts:
            self._run.log({name: _table(self._wandb, texts)})

    def ended_early(self, error: BaseException) -> None:
        self._exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1

    def close(self) -> None:
        """Finish the service's run; a run that ended early is marked as failed until it is resumed."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)


class TrackioSink(Sink):
    """Sink that sends a run to Trackio: iterations and scores by iteration, and tables of texts.

    Trackio keeps its data on this machine (`TRACKIO_DIR`), unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` is set. A
    Space that it creates is private. If the package is not installed, a `MissingExtraError` is raised.
    """

    name = "trackio"

    def __init__(self) -> None:
        self._trackio = import_extra("trackio", extra="trackio", needed_by="logging to Trackio")
        self._run: Any = None
        self._iteration = 0  # optimizer step of supervised runs

    def open(self, run: RunDescription) -> None:
        """Start a run in Trackio, or resume that of an interrupted run."""
        run_id, project = _id_of(run, TRACKIO_FILE)
        self._run = self._init(run, project, resume="never" if run_id is None else "allow")

        # Trackio finds a run by its name, and takes the latest of several: that of another folder is not continued.
        if run_id is not None and self._run.id != run_id:
            self._finish()
            self._run = self._init(run, project, resume="never")
        if self._run.id != run_id:
            _write_id(run, TRACKIO_FILE, self._run.id, project)

    def _init(self, run: RunDescription, project: str, *, resume: str) -> Any:
        return self._trackio.init(
            project, name=run.experiment, config=to_json(run.config), resume=resume, private=True, embed=False
        )

    def start(self, n_iters: int, completed: int = 0) -> None:
        self._iteration = completed

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
        self._iteration = iteration
        self._run.log(to_json({**values, "timesteps": timesteps}), step=iteration)

    def log_metrics(self, epoch: Epoch, split_name: str, metrics: Mapping[str, Any]) -> None:
        scores = {f"{split_name}/{key}": score for key, score in metrics.items()}
        self._run.log(to_json({"epoch": epoch, **scores}), step=self._iteration)

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        self._log_table(f"{split_name}_predictions", predictions)

    def log_responses(self, epoch: Epoch, responses: Predictions) -> None:
        self._log_table("rollout_responses", responses)

    def _log_table(self, name: str, texts: Predictions) -> None:
        # One name: Trackio shows a table's steps one at a time.
        if texts:
            self._run.log({name: _table(self._trackio, texts)}, step=self._iteration)

    def close(self) -> None:
        """Finish the run in Trackio, which writes what is still in memory."""
        if self._run is not None:
            self._finish()

    def _finish(self) -> None:
        self._run.finish()

        # Trackio finishes its current run when the process ends. If this is still ours, it would be a second time;
        # `trackio.finish` would finish the user's own run if that is the current one.
        current = self._trackio.context_vars.current_run
        if current.get() is self._run:
            current.set(None)


def _table(library: Any, texts: Predictions) -> Any:
    """Return a table of texts and their scores, of wandb or trackio, whose tables have the same arguments."""
    columns = list(texts[0])
    rows = []
    for text in texts:
        rows.append([to_json(text.get(column)) for column in columns])

    # Mixed types: a metric's score may be a number for one text and NaN, hence None, for another.
    return library.Table(columns=columns, data=rows, allow_mixed_types=True)


def _write_id(run: RunDescription, file: str, run_id: str, project: str) -> None:
    """Write the file that a resumed run finds the service's run by."""
    content = {"id": run_id, "project": project, "experiment": run.experiment, "place": _path_from_project(run)}
    write_whole(run.path / file, json.dumps(content) + "\n")


def _path_from_project(run: RunDescription) -> str:
    """Return the path from the project on. Names may contain slashes; `--resume` uses the last two parts as names."""
    return f"{run.project}/" + f"/{run.path.as_posix()}".rpartition(f"/{run.project}/")[2]


def _id_of(run: RunDescription, file: str) -> tuple[str | None, str]:
    """Return the service's id of this folder's run and its project; the id is None for a copied folder."""
    try:
        content = read_json(run.path / file)
        run_id = content["id"]
        project = content["project"]
        path = content.get("place", f"{project}/{content['experiment']}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RL4LMsLikeError):
        return None, run.project

    # A copied folder is another run: its numbers must not be added to those of the original.
    is_of_this_folder = f"/{run.path.as_posix()}".endswith(f"/{path}")
    if not isinstance(run_id, str) or not isinstance(project, str) or not is_of_this_folder:
        return None, run.project
    return run_id, project
