"""TensorBoard event files: iterations by tokens, evaluations by epoch.

`tensorboard --logdir <folder>` shows every experiment below it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl4lms_like.core.errors import import_extra
from rl4lms_like.tracking.sink import Epoch, Predictions, RunDescription, Sink

N_TEXTS = 5


class TensorBoardSink(Sink):
    """Sink for event files; uses Stable-Baselines3's writer, which supports its figures, videos and histograms.

    Args:
        folder: event files are written to `<folder>/<experiment>`.

    Raises:
        MissingExtraError: the package is not installed.
    """

    name = "tensorboard"

    def __init__(self, folder: str | Path) -> None:
        import_extra("tensorboard", extra="tensorboard", needed_by="tensorboard_log")
        self.folder = Path(folder)
        self._output: Any = None

    def open(self, run: RunDescription) -> None:
        """Open the event file."""
        from stable_baselines3.common.logger import TensorBoardOutputFormat

        self._output = TensorBoardOutputFormat(str(self.folder / run.experiment))
        self._hook, threading.excepthook = threading.excepthook, self._thread_failed

    def write(self, values: Mapping[str, Any], *, iteration: int, timesteps: int) -> None:
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
