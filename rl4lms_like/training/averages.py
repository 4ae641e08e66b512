"""Averages of the trained weights of a run, `train_evaluation.average`.

    m_0 = w_0                                 w_t: weights after t iterations (offline: optimizer steps)
    m_t = m + beta_t (w_t - m)                every `every` iterations, m being the mean before

    beta_t = 1 - decay                        exponential moving average
             (lag + t)^-ema_power             with `decay: null`

    average = m_t                             without `bias_power`
              m_t + alpha_t (w_t - w_0)       alpha_t = (lag + t)^-bias_power: BEMA (arXiv 2508.00180)

Only trained weights are averaged, in float32; of adapters, their factors. The tensors are part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl4lms_like.config.run_config import AverageConfig
from rl4lms_like.system.disk import saving
from rl4lms_like.system.errors import CheckpointError
from rl4lms_like.system.interruption import Interruption
from rl4lms_like.tracking.base import Tracker
from rl4lms_like.training.resuming.states import load_weights

FOLDER = "average"
"""Folder in the run folder with the averaged model."""
NEVER_UPDATED = "there are no averaged weights: the run ended before the first update (train_evaluation.average.every)"
SPLITS = {"val": "average_val", "test": "average_test"}
"""Name under which the evaluation of the averaged model on a split is logged."""


class WeightAverage:
    """Average of the trained weights of a model.

    Args:
        config: how new weights are averaged.
        model: has the weights at the start of the run.

    Attributes:
        last: number of the iteration with the last update; 0 before the first one.
    """

    def __init__(self, config: AverageConfig, model: nn.Module) -> None:
        self.config = config
        self.last = 0
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

        # Copies, also of weights that are float32 already. The correction of BEMA needs the first weights, and keeps
        # its result, since the weights may be others when the average is read.
        self.mean = self._copied_weights()
        self.first: dict[str, Tensor] = {}
        self.corrected: dict[str, Tensor] = {}
        if config.bias_power is not None:
            self.first = self._copied_weights()
            self.corrected = self._copied_weights()

    def _copied_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().to(torch.float32, copy=True) for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, iteration: int) -> None:
        """Average the weights after an iteration, if it is one of every `every`."""
        config = self.config
        if iteration % config.every:
            return
        self.last = iteration
        beta = (config.lag + iteration) ** -config.ema_power if config.decay is None else 1 - config.decay
        for name, weight in self.weights.items():
            self.mean[name].lerp_(weight.float(), beta)

        if config.bias_power is not None:
            alpha = (config.lag + iteration) ** -config.bias_power
            for name, weight in self.weights.items():
                self.corrected[name].copy_(self.mean[name] + alpha * (weight.float() - self.first[name]))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Replace the weights of the model by their averages within the block."""
        weights = {name: weight.detach().clone() for name, weight in self.weights.items()}
        try:
            self._write(self.corrected or self.mean)
            yield
        finally:
            self._write(weights)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(values[name])

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name. They are not copied."""
        named = {"mean": self.mean, "first": self.first, "corrected": self.corrected}
        return {f"{kind}.{name}": tensor for kind, tensors in named.items() for name, tensor in tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the state."""
        return {"last": self.last}

    def restore(self, state: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
        """Restore the numbers and tensors of a checkpoint; None if it has none.

        Raises:
            CheckpointError: the run had no average, or another kind of average.
        """
        if state is None:
            raise CheckpointError("it has no averaged weights: they cannot be added to a run that has begun")
        self.last = state["last"]
        load_weights(self.tensors(), tensors)


def save_average(
    average: WeightAverage | None, write: Callable[[Path], Any], tracker: Tracker, interruption: Interruption
) -> None:
    """Save the averaged model in the run folder, next to the model.

    Args:
        average: None if the run has none.
        write: writes the folder of the model.
        tracker: of the run.
        interruption: an interruption waits until the folder is complete.

    Raises:
        RL4LMsLikeError: the folder cannot be written.
    """
    if average is None:
        return
    if not average.last:
        tracker.log_info(NEVER_UPDATED)
        return

    folder = tracker.run_path / FOLDER
    saved = "the averaged model"
    with average.in_model(), interruption.finishing(f"{saved} of this run"), saving(f"{saved} to {folder}"):
        write(folder)


def average_of(config: AverageConfig | None, model: nn.Module) -> WeightAverage | None:
    """Return the average that a config asks for."""
    return None if config is None else WeightAverage(config, model)
