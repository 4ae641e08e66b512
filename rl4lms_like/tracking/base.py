"""Tracker that records a run's metrics, texts and messages in all sinks.

    SB3's logger ──dump──┐                          ┌── RunFolder       always; its errors end the run
    trainer ──metrics,───┼──►  Tracker  ──events──► ├── ConsoleSink     progress, quiet or not
              texts      │                          ├── WandbSink, TrackioSink, TensorBoardSink    if requested
    logging.getLogger────┘──► log.txt, console      └── sinks of the user

The interface is RL4LMs'. If a sink fails, one warning is logged and the run continues.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.pictures import Picture
from rl4lms_like.system.disk import reason, saving, share_permissions
from rl4lms_like.system.errors import ComponentError, RL4LMsLikeError
from rl4lms_like.system.secrets import masked, without_secrets
from rl4lms_like.system.wording import printable
from rl4lms_like.tracking.run_folder import LOG_FILE, ROLLOUT_GROUPS, RunFolder, claim_folder, experiment_folder
from rl4lms_like.tracking.sink import Epoch, Predictions, RunDescription, Sink
from rl4lms_like.tracking.thumbnails import keep_thumbnails, with_thumbnails

if TYPE_CHECKING:
    from filelock import FileLock
    from stable_baselines3.common.logger import Logger

logger = logging.getLogger(__name__)
N_LOGGED_TEXTS = 10
LIBRARY = "rl4lms_like"
FILE_ONLY = {"file_only": True}
"""`extra` of a message that the console does not show."""

IN_SHORT = {"in_short": True}
"""`extra` of a message that the console shortens to one or two lines; `log.txt` has it in full."""


class Tracker:
    """Records a run in its folder, on the console and in further sinks.

    Args:
        base_path_to_store_results: root folder of the results.
        run_config: the run's config as plain data; stored as `config.json`.
        project_name: second part of the folder, and the project in Weights & Biases.
        experiment_name: third part. If that folder already contains a run, `<experiment_name>_2` is used and logged.
        entity_name: account or team in Weights & Biases.
        wandb_log: send the run to Weights & Biases.
        log_level: level of the messages in `log.txt` and on the console; only this library's messages are recorded.
        tensorboard_log: folder for TensorBoard event files.
        wandb_project: project in Weights & Biases; default: `project_name`.
        trackio_log: log to Trackio.
        quiet: print only warnings on the console.
        resume: continue in the experiment's own folder, appending to its files.
        held: lock of that folder, if the caller already holds it.
        sinks: further sinks.

    Raises:
        MissingExtraError: the package of a requested service is not installed.
        RL4LMsLikeError: another process is writing to the folder that is to be resumed.
    """

    def __init__(
        self,
        base_path_to_store_results: str | Path,
        run_config: Mapping[str, Any],
        project_name: str,
        experiment_name: str,
        entity_name: str | None = None,
        wandb_log: bool = False,
        log_level: int = logging.INFO,
        *,
        tensorboard_log: str | Path | None = None,
        wandb_project: str | None = None,
        trackio_log: bool = False,
        quiet: bool = False,
        resume: bool = False,
        held: FileLock | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        from rl4lms_like.tracking.console import ConsoleHandler, ConsoleSink

        # Services before the folder: a missing package must not leave a folder that contains a run.
        self._console = ConsoleSink(quiet=quiet)
        services: list[Sink] = []
        if wandb_log or trackio_log or tensorboard_log is not None:
            from rl4lms_like.tracking.services import TensorBoardSink, TrackioSink, WandbSink

            if wandb_log:
                services.append(WandbSink(wandb_project))
            if trackio_log:
                services.append(TrackioSink())
            if tensorboard_log is not None:
                services.append(TensorBoardSink(tensorboard_log))

        # On resume the folder exists under any name; a mount at the root may have no valid project name.
        if resume:
            folder = Path(base_path_to_store_results) / project_name / experiment_name
        else:
            folder = experiment_folder(base_path_to_store_results, project_name, experiment_name)

        # Secrets are masked before anything is written or sent.
        run_config = masked(run_config)
        self.run_config = dict(run_config)
        try:
            self.run_path, self._lock = claim_folder(folder, run_config, resume=resume, held=held)
            self._folder = RunFolder(self.run_path)
            log_handler = _LogFile(self.run_path / LOG_FILE, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise RL4LMsLikeError(f"cannot write to the run folder {folder}: {reason(error)}") from error
        console_handler = ConsoleHandler(self._console)
        console_level = logging.WARNING if quiet else log_level
        self._handlers = [_listen(log_level, log_handler), _listen(console_level, console_handler)]

        self._iteration = 0
        self._timesteps = 0
        self._reported: set[str] = set()  # sinks' errors and non-finite keys of which a warning was logged
        self._is_done = False
        if self.run_path != folder:
            logger.info("%s already contains a run; this run is stored in %s", folder, self.run_path)

        # A sink that cannot be opened receives no further events.
        run = RunDescription(
            self.run_path,
            project=project_name,
            experiment=self.run_path.name,
            config=dict(run_config),
            entity=entity_name,
        )
        self._sinks = [sink for sink in (self._console, *services, *sinks) if self._try(sink, "open", run)]
        logger.info("run folder: %s", self.run_path, extra=FILE_ONLY)

    @property
    def checkpoint_base_path(self) -> Path:
        """Folder for checkpoints; created on first access."""
        path = self.run_path / "checkpoints"
        path.mkdir(exist_ok=True)
        return path

    def file_sizes(self, *, on_disk: bool = True) -> dict[str, int]:
        """Return the sizes of the run's files in bytes, for `cut_files`; `on_disk` flushes them to disk first."""
        return self._folder.file_sizes(on_disk=on_disk)

    def cut_files(self, sizes: Mapping[str, int]) -> None:
        """Remove the lines and predictions that were written after a checkpoint.

        Raises:
            CheckpointError: a file is shorter than at the checkpoint, or was changed.
        """
        self._folder.cut(sizes)

    def start(self, n_iters: int, *, completed: int = 0) -> None:
        """Signal the start of training: `n_iters` iterations in all, `completed` of them before a resume."""
        self._iteration = completed
        self._pass_to_all("start", n_iters, completed)

    def make_sb3_logger(self, verbose: int = 0) -> Logger:
        """Return a Stable-Baselines3 logger for `algorithm.set_logger`; this tracker records its dumps."""
        from rl4lms_like.tracking.services import make_logger

        return make_logger(self, verbose=verbose)

    def log_rollout_infos(self, rollout_info: Mapping[str, Any]) -> None:
        """Record the values of a rollout, for algorithms that do not use SB3's logger."""
        self.log_values(rollout_info)

    def log_training_infos(self, training_info: Mapping[str, Any]) -> None:
        """Record the values of an update, for algorithms that do not use SB3's logger."""
        self.log_values(training_info)

    def log_values(
        self,
        values: Mapping[str, Any],
        *,
        timesteps: int | None = None,
        excluded: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Record values of the current iteration. Values of a rollout start the next iteration.

        Args:
            values: values by key. `rollout_info/*` and `rollout/*` belong to the rollout, all others to the update;
                `time/*` belongs to the rollout if there is one. `time/iteration` sets the iteration's number.
            timesteps: tokens generated so far in the run; default: the sum of `rollout_info/n_tokens`.
            excluded: key -> names of sinks that do not receive it (SB3's `record(..., exclude=...)`).
        """
        if not values:
            return

        # SB3's own algorithms log no `time/iteration`: for them iterations are counted, by their rollouts.
        if any(key.startswith(ROLLOUT_GROUPS) for key in values):
            self._iteration += 1
            self._timesteps += int(values.get("rollout_info/n_tokens", 0))
        self._iteration = int(values.get("time/iteration", self._iteration))
        self._timesteps = self._timesteps if timesteps is None else timesteps
        self._warn_of_non_finite(values)

        names_by_key = excluded or {}
        for sink in (self._folder, *self._sinks):
            sink_values = {key: value for key, value in values.items() if sink.name not in names_by_key.get(key, ())}
            self._pass(sink, "write", sink_values, iteration=self._iteration, timesteps=self._timesteps)

    def show_progress(self, iteration: int, values: Mapping[str, Any] | None = None) -> None:
        """Show progress on the console between two calls of `log_values`; nothing is recorded."""
        self._pass(self._console, "advance", iteration, values or {})

    def log_metrics(self, epoch: Epoch, split_name: str, metrics_dict: Mapping[str, Any]) -> None:
        """Record the corpus scores of one evaluation, by metric key."""
        self._warn_of_non_finite({f"{split_name}/{key}": score for key, score in metrics_dict.items()})
        self._pass_to_all("log_metrics", epoch, split_name, metrics_dict)

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        """Record a split's texts with their scores; ten of them are also written to `log.txt`.

        Sinks receive paths of thumbnails in the run folder in place of the pictures of prompts.
        """
        with saving(f"thumbnails to the run folder {self.run_path}"):
            predictions = with_thumbnails(self.run_path, predictions)
        self._pass_to_all("log_predictions", epoch, split_name, predictions)

        # The same samples in every evaluation, so that the log shows how their texts change.
        logged = random.Random(0).sample(list(predictions), min(N_LOGGED_TEXTS, len(predictions)))
        for prediction in logged:
            logger.info("epoch %s, %s split: %s", epoch, split_name, dict(prediction), extra=FILE_ONLY)

    def log_responses(self, epoch: Epoch, responses: Predictions) -> None:
        """Pass responses of the last rollout with their rewards to the sinks; the run folder does not keep them."""
        self._pass_to_all("log_responses", epoch, responses)

    def log_line(self, file: str, line: Mapping[str, Any]) -> None:
        """Append a line to a file of the run folder, for instance `alarms.jsonl`; other sinks do not receive it."""
        self._pass(self._folder, "append", file, line)

    def log_environment(self, environment: Mapping[str, Any]) -> None:
        """Record hardware and software in `environment.json`; a resumed run appends an entry if they changed."""
        self._pass(self._folder, "log_environment", environment)

    def keep_thumbnails(self, pictures: Iterable[Picture]) -> list[str]:
        """Write thumbnails of pictures to the run folder; return their paths in it."""
        with saving(f"thumbnails to the run folder {self.run_path}"):
            return keep_thumbnails(self.run_path, pictures)

    def log_info(self, msg: str) -> None:
        """Log a message on the console and in `log.txt`."""
        logger.info("%s", msg)

    def print(self, text: str) -> None:
        """Print `text` above the live display, unless quiet; it is not logged."""
        self._pass(self._console, "print", text)

    def save_auto_model(self, model: Any, tokenizer: Any = None) -> Path:
        """Save model and tokenizer so that `AutoModel*.from_pretrained` loads them; return the folder."""
        path = self.run_path / "model"
        for saved in (model, tokenizer):
            if saved is not None:
                saved.save_pretrained(path)
                share_permissions(path)
        return path

    def finish(self) -> None:
        """Mark the run as finished, so that the same command starts another run."""
        self._pass(self._folder, "finish", self._iteration)

    def done(self) -> None:
        """Close all sinks; further calls do nothing."""
        if self._is_done:
            return
        self._is_done = True
        logger.info("done after %d iterations", self._iteration, extra=FILE_ONLY)

        # Sinks before handlers: a sink that fails at its end is still logged. The lock is last, after all writing.
        self._pass_to_all("close")
        for handler in self._handlers:
            logging.getLogger(LIBRARY).removeHandler(handler)
            handler.close()
        self._lock.release()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.done()
            return

        if isinstance(error, ComponentError) and error.texts:
            self._keep_texts(error)

        # A traceback helps only for errors in code: the user's components, or mistakes of this library.
        is_expected = isinstance(error, RL4LMsLikeError | KeyboardInterrupt) and not isinstance(error, ComponentError)
        message = "the run ended early: %s: %s"
        logger.error(message, type(error).__name__, error, extra=FILE_ONLY, exc_info=None if is_expected else error)
        for sink in self._sinks:
            self._try(sink, "ended_early", error)
        self.done()

    def _keep_texts(self, error: ComponentError) -> None:
        """Write the texts that a component failed on to a file, and add its path to the error."""
        try:
            file = self._folder.keep_texts(str(error), error.texts)
        except OSError as failure:  # must not hide the original error
            logger.warning("cannot save the %d texts of the failed batch: %s", len(error.texts), failure)
        else:
            error.args = (f"{error}\nThe {len(error.texts)} texts of the failed batch are in {file}",)

    def _pass_to_all(self, event: str, *args: Any) -> None:
        # The folder is first: its files have what a sink fails on.
        for sink in (self._folder, *self._sinks):
            self._pass(sink, event, *args)

    def _pass(self, sink: Sink, event: str, *args: Any, **kwargs: Any) -> None:
        """Call a sink's method; only an error of the run folder, such as a full disk, is raised."""
        if sink is not self._folder:
            self._try(sink, event, *args, **kwargs)
            return
        try:
            getattr(sink, event)(*args, **kwargs)
        except OSError as error:
            raise RL4LMsLikeError(f"cannot write to the run folder {self.run_path}: {reason(error)}") from error

    def _try(self, sink: Sink, event: str, *args: Any, **kwargs: Any) -> bool:
        """Return False if the sink raised; warn unless this event or this error of the sink was reported before."""
        try:
            getattr(sink, event)(*args, **kwargs)
        except Exception as error:
            # A service that is down fails in every iteration, and with one error in several events: one warning is
            # enough.
            kinds = {f"{sink.name}.{event}", f"{sink.name}: {type(error).__name__}: {error}"}
            if not kinds & self._reported:
                logger.warning(
                    "%s failed in %s (%s: %s); the run continues, its files are in %s",
                    *(sink.name, event, type(error).__name__, error, self.run_path),
                )
            self._reported |= kinds
            return False
        return True

    def _warn_of_non_finite(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            # A float, or a scalar of NumPy or torch.
            is_number = isinstance(value, float) or getattr(value, "shape", None) == ()
            if is_number and not math.isfinite(value) and key not in self._reported:
                self._reported.add(key)
                logger.warning("%s is %s in iteration %d; written as null", key, float(value), self._iteration)


class SilentTracker(Tracker):
    """Tracker that writes nothing, for a process that is not the main one of its run.

    Args:
        run_path: folder of the run.
        run_config: the run's config as plain data.
    """

    def __init__(self, run_path: Path, run_config: Mapping[str, Any]) -> None:
        self.run_path = run_path
        self.run_config = dict(masked(run_config))

        # Without a handler, Python would print this library's warnings, once in each process.
        self._handlers = [_listen(logging.INFO, logging.NullHandler())]
        self._folder = self._console = Sink()  # type: ignore[assignment]
        self._sinks = []
        self._iteration = 0
        self._timesteps = 0
        self._reported: set[str] = set()

    def file_sizes(self, *, on_disk: bool = True) -> dict[str, int]:
        """Return nothing: the files are those of the main process."""
        return {}

    def cut_files(self, sizes: Mapping[str, int]) -> None:
        """Do nothing: the files are those of the main process."""

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        """Do nothing: two processes must not write the same thumbnails."""

    def keep_thumbnails(self, pictures: Iterable[Picture]) -> list[str]:
        """Return no paths: the files are those of the main process."""
        return []

    def done(self) -> None:
        """Stop the suppression of messages."""
        for handler in self._handlers:
            logging.getLogger(LIBRARY).removeHandler(handler)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.done()

    def _pass(self, sink: Sink, event: str, *args: Any, **kwargs: Any) -> None:
        """Record nothing."""


class _LogFile(logging.FileHandler):
    """Handler for `log.txt`. A write error gives one warning and does not end the run."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's)
        if not self._has_failed:
            self._has_failed = True
            logger.warning("cannot write to %s: %s; messages are lost", self.baseFilename, sys.exc_info()[1])

    def close(self) -> None:
        with suppress(OSError):  # raised if buffered messages cannot be written
            super().close()


class _Formatter(logging.Formatter):
    """Formatter that removes secrets and terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().format(record)))


def _listen(level: int, handler: logging.Handler) -> logging.Handler:
    """Attach a handler to the loggers of this library only."""
    handler.setLevel(level)
    handler.setFormatter(_Formatter("%(asctime)s [%(levelname)s] %(message)s"))

    # The logger passes what the most verbose of its handlers records.
    namespace = logging.getLogger(LIBRARY)
    namespace.addHandler(handler)
    namespace.setLevel(min(level, namespace.level or level))
    return handler
