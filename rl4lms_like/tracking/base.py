"""The tracker: one object that hears everything a run has to say, and passes it on.

    SB3's logger ──dump──┐                          ┌── RunFolder       always; its errors end the run
    trainer ──metrics,───┼──►  Tracker  ──events──► ├── ConsoleSink     progress, quiet or not
              texts      │                          ├── WandbSink, TensorBoardSink      if asked for
    logging.getLogger────┘──► log.txt, console      └── sinks of the user

The calls are RL4LMs'. A sink that fails is named once and the run goes on without what it could not take.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rl4lms_like.core.disk import reason, share
from rl4lms_like.core.errors import ComponentError, RL4LMsLikeError
from rl4lms_like.core.secrets import masked
from rl4lms_like.tracking.messages import LIBRARY, LogFile, listen
from rl4lms_like.tracking.run_folder import LOG_FILE, ROLLOUT_GROUPS, RunFolder, claim_folder, experiment_folder
from rl4lms_like.tracking.sink import Epoch, Predictions, RunDescription, Sink

if TYPE_CHECKING:
    from filelock import FileLock
    from stable_baselines3.common.logger import Logger

logger = logging.getLogger(__name__)
N_LOGGED_TEXTS = 10
FILE_ONLY = {"file_only": True}


class Tracker:
    """Records a run into its folder, on the console and wherever else it was asked to.

    Args:
        base_path_to_store_results: root of the results.
        run_config: the run's config as plain data; stored as `config.json`.
        project_name: second part of the folder, and the project in Weights & Biases.
        experiment_name: third part. If that folder holds a run already, `<experiment_name>_2` is taken, and said so.
        entity_name: account or team in Weights & Biases.
        wandb_log: send the run to Weights & Biases.
        log_level: of the messages in `log.txt` and on the console; only this library's messages go there.
        tensorboard_log: folder for TensorBoard event files.
        quiet: nothing on the console but warnings.
        resume: continue in the experiment's own folder, appending to its files.
        held: the lock of that folder, if the caller holds it already.
        sinks: further places for the numbers.

    Raises:
        MissingExtraError: a service was asked for whose package is not installed.
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
        quiet: bool = False,
        resume: bool = False,
        held: FileLock | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        from rl4lms_like.tracking.console import ConsoleHandler, ConsoleSink

        self._console = ConsoleSink(quiet=quiet)
        services = _services(wandb_log, tensorboard_log)
        if resume:  # it is there, whatever it is called by now: a mount at the root has no project's name
            wanted = Path(base_path_to_store_results) / project_name / experiment_name
        else:
            wanted = experiment_folder(base_path_to_store_results, project_name, experiment_name)
        run_config = masked(run_config)
        self.run_config = dict(run_config)
        try:
            self.run_path, self._lock = claim_folder(wanted, run_config, resume=resume, held=held)
            self._folder = RunFolder(self.run_path)
            log = LogFile(self.run_path / LOG_FILE, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise RL4LMsLikeError(f"cannot write to the run folder {wanted}: {reason(error)}") from error
        self._handlers = listen(log_level, log)
        self._handlers += listen(logging.WARNING if quiet else log_level, ConsoleHandler(self._console))
        self._iteration, self._timesteps = 0, 0
        self._reported: set[str] = set()
        self._is_done = False
        if self.run_path != wanted:
            logger.info("%s holds a run already; this one goes to %s", wanted, self.run_path)
        run = RunDescription(self.run_path, project_name, self.run_path.name, dict(run_config), entity_name)
        self._sinks = [sink for sink in (self._console, *services, *sinks) if self._try(sink, "open", run)]
        logger.info("run folder: %s", self.run_path, extra=FILE_ONLY)

    @property
    def checkpoint_base_path(self) -> Path:
        """Where checkpoints belong; made when first asked for."""
        path = self.run_path / "checkpoints"
        path.mkdir(exist_ok=True)
        return path

    def file_sizes(self, *, on_disk: bool = True) -> dict[str, int]:
        """How far the run's files have got, in bytes; what `cut_files` goes back to. Waits for the disk if asked to."""
        return self._folder.file_sizes(on_disk=on_disk)

    def cut_files(self, sizes: Mapping[str, int]) -> None:
        """Takes away the lines and predictions that were written after a checkpoint.

        Raises:
            CheckpointError: a file has less than it had then, or other lines.
        """
        self._folder.cut(sizes)

    def start(self, n_iters: int, *, completed: int = 0) -> None:
        """Training begins: `n_iters` iterations in all, `completed` of which a resumed run has behind it."""
        self._iteration = completed
        self._tell("start", n_iters, completed)

    def make_sb3_logger(self, verbose: int = 0) -> Logger:
        """A Stable-Baselines3 logger, for `algorithm.set_logger`, whose dumps this tracker records."""
        from rl4lms_like.tracking.sb3 import make_logger

        return make_logger(self, verbose=verbose)

    def log_rollout_infos(self, rollout_info: Mapping[str, Any]) -> None:
        """Records what a rollout measured, for algorithms that do not use SB3's logger."""
        self.log_values(rollout_info)

    def log_training_infos(self, training_info: Mapping[str, Any]) -> None:
        """Records what an update measured, for algorithms that do not use SB3's logger."""
        self.log_values(training_info)

    def log_values(
        self,
        values: Mapping[str, Any],
        *,
        timesteps: int | None = None,
        excluded: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Records values of the current iteration. Those of a rollout begin the next iteration.

        Args:
            values: by key; `rollout_info/*` and `rollout/*` are the rollout's, all others the update's; `time/*` goes
                with the rollout if there is one. `time/iteration` sets the iteration's number.
            timesteps: tokens generated so far in the run; default: counted from `rollout_info/n_tokens`.
            excluded: for each key the names of sinks that shall not get it (SB3's `record(..., exclude=...)`).
        """
        if not values:
            return
        if any(key.startswith(ROLLOUT_GROUPS) for key in values):
            self._iteration += 1
            self._timesteps += int(values.get("rollout_info/n_tokens", 0))
        self._iteration = int(values.get("time/iteration", self._iteration))
        self._timesteps = self._timesteps if timesteps is None else timesteps
        self._warn_of_non_finite(values)
        for sink in (self._folder, *self._sinks):
            kept = {key: value for key, value in values.items() if sink.name not in (excluded or {}).get(key, ())}
            self._pass(sink, "write", kept, iteration=self._iteration, timesteps=self._timesteps)

    def show_progress(self, iteration: int, values: Mapping[str, Any] | None = None) -> None:
        """Shows on the console how far a run is between two `log_values`; nothing is recorded."""
        self._try(self._console, "advance", iteration, values)

    def log_metrics(self, epoch: Epoch, split_name: str, metrics_dict: Mapping[str, Any]) -> None:
        """Records the corpus scores of one evaluation, by metric key."""
        self._warn_of_non_finite({f"{split_name}/{key}": score for key, score in metrics_dict.items()})
        self._tell("log_metrics", epoch, split_name, metrics_dict)

    def log_predictions(self, epoch: Epoch, split_name: str, predictions: Predictions) -> None:
        """Records a split's texts with their scores; ten of them also go to `log.txt`."""
        self._tell("log_predictions", epoch, split_name, predictions)
        for prediction in random.Random(0).sample(list(predictions), min(N_LOGGED_TEXTS, len(predictions))):
            logger.info("epoch %s, %s split: %s", epoch, split_name, dict(prediction), extra=FILE_ONLY)

    def log_line(self, file: str, line: Mapping[str, Any]) -> None:
        """Adds a line to a file of the run folder, `alarms.jsonl` for instance; no other sink hears of it."""
        self._pass(self._folder, "append", file, line)

    def log_environment(self, environment: Mapping[str, Any]) -> None:
        """Notes what the run is computed by, in `environment.json`; a resumed run adds what has changed."""
        self._pass(self._folder, "log_environment", environment)

    def log_info(self, msg: str) -> None:
        """A notice, on the console and in `log.txt`."""
        logger.info("%s", msg)

    def print(self, text: str) -> None:
        """Prints `text` above the live display, unless quiet; it is not logged."""
        self._try(self._console, "print", text)

    def save_auto_model(self, model: Any, tokenizer: Any = None) -> Path:
        """Saves a model so that `AutoModel*.from_pretrained` loads it, its tokenizer beside it; returns the folder."""
        path = self.run_path / "model"
        for part in (model, tokenizer):
            if part is not None:
                part.save_pretrained(path)
                share(path)
        return path

    def finish(self) -> None:
        """The run came to its end: marks its folder, so that the same command starts another run."""
        self._pass(self._folder, "finish", self._iteration)

    def done(self) -> None:
        """Closes every sink; called again it does nothing."""
        if self._is_done:
            return
        self._is_done = True
        logger.info("done after %d iterations", self._iteration, extra=FILE_ONLY)
        self._tell("close")
        for handler in self._handlers:
            logging.getLogger(LIBRARY).removeHandler(handler)
            handler.close()
        self._lock.release()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            if isinstance(error, ComponentError) and error.texts:
                self._keep_texts(error)
            ours = isinstance(error, RL4LMsLikeError | KeyboardInterrupt) and not isinstance(error, ComponentError)
            said = "the run ended early: %s: %s"
            logger.error(said, type(error).__name__, error, extra=FILE_ONLY, exc_info=None if ours else error)
            for sink in self._sinks:
                self._try(sink, "ended_early", error)
        self.done()

    def _keep_texts(self, error: ComponentError) -> None:
        """Writes the texts that a component failed on to a file, which the error names from now on."""
        try:
            file = self._folder.keep_texts(str(error), error.texts)
        except OSError as failure:  # why the run ended is never hidden by it
            logger.warning("the %d texts that it failed on are lost: %s", len(error.texts), failure)
        else:
            error.args = (f"{error}\nThe {len(error.texts)} texts that it was to score: {file}",)

    def _tell(self, event: str, *args: Any) -> None:
        for sink in (self._folder, *self._sinks):
            self._pass(sink, event, *args)

    def _pass(self, sink: Sink, event: str, *args: Any, **kwargs: Any) -> None:
        if sink is self._folder:
            try:
                getattr(sink, event)(*args, **kwargs)
            except OSError as error:  # a full disk
                raise RL4LMsLikeError(f"cannot write to the run folder {self.run_path}: {reason(error)}") from error
        else:
            self._try(sink, event, *args, **kwargs)

    def _try(self, sink: Sink, event: str, *args: Any, **kwargs: Any) -> bool:
        """Whether the sink took the event; a failure is said once for each sink, and once for each kind of event."""
        try:
            getattr(sink, event)(*args, **kwargs)
        except Exception as error:
            kinds = {f"{sink.name}.{event}", f"{sink.name}: {type(error).__name__}: {error}"}
            if not kinds & self._reported:
                logger.warning(
                    "%s failed in %s (%s: %s); the run goes on, its files are in %s",
                    *(sink.name, event, type(error).__name__, error, self.run_path),
                )
            self._reported |= kinds
            return False
        return True

    def _warn_of_non_finite(self, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            is_number = isinstance(value, float) or getattr(value, "shape", None) == ()
            if is_number and not math.isfinite(value) and key not in self._reported:
                self._reported.add(key)
                logger.warning("%s is %s in iteration %d; written as null", key, float(value), self._iteration)


def _services(wandb_log: bool, tensorboard_log: str | Path | None) -> list[Sink]:
    services: list[Sink] = []
    if wandb_log:
        from rl4lms_like.tracking.wandb import WandbSink

        services.append(WandbSink())
    if tensorboard_log is not None:
        from rl4lms_like.tracking.tensorboard import TensorBoardSink

        services.append(TensorBoardSink(tensorboard_log))
    return services
