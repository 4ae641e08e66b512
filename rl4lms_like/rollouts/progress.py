"""Progress of an update, so that an interrupted update can resume with its next minibatch.

    rollout ─ update begins ─ epoch 1: m m m m ─ epoch 2: m m | m m
                                                              epoch 2, 2 done

On resuming, the order of the epoch is sampled again from the same random state, and finished minibatches are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from rl4lms_like.rollouts.buffer import EpisodeBuffer, Minibatch

Logged = dict[str, Tensor]
"""Logged scalars of a step, by name."""


class UpdateProgress:
    """Progress of an update.

    Attributes:
        is_prepared: whether the rollout is prepared for the steps (its advantages are normalised, for instance).
        can_go_on: whether the update can be resumed: no step has changed only part of the weights.
        is_over: whether the update is finished.
        epoch: current pass over the rollout, from 1; 0 = none yet.
        n_done: number of finished minibatches of this pass.
        steps: logged scalars of each step so far.
    """

    def __init__(self) -> None:
        self.is_prepared = False
        self.can_go_on = False
        self.is_over = False
        self.epoch = 0
        self.n_done = 0
        self.steps: list[Logged] = []
        self._order: dict[str, Any] = {}

    def remaining(
        self, buffer: EpisodeBuffer, n_epochs: int, batch_size: int | None
    ) -> Iterator[tuple[int, Minibatch]]:
        """Iterate over the minibatches that remain of `n_epochs` passes, each with the number of its pass.

        Args:
            buffer: contains the rollout.
            n_epochs: number of passes over it.
            batch_size: approximate number of tokens per minibatch; None = the whole rollout at once.
        """
        for epoch in self.epochs(buffer, n_epochs):
            for minibatch in self.minibatches(buffer, batch_size):
                yield epoch, minibatch

    def epochs(self, buffer: EpisodeBuffer, n_epochs: int) -> Iterator[int]:
        """Iterate over the numbers of the passes that remain of `n_epochs`, the interrupted one included."""
        if self.epoch:
            buffer.load_state_dict(self._order)
        for epoch in range(max(self.epoch, 1), n_epochs + 1):
            self.epoch = epoch
            self._order = buffer.state_dict()
            yield epoch
            if epoch < n_epochs:
                self.n_done = 0

    def minibatches(self, buffer: EpisodeBuffer, batch_size: int | None) -> Iterator[Minibatch]:
        """Iterate over the minibatches that remain of the current pass; the caller counts those that are done.

        Args:
            buffer: contains the rollout.
            batch_size: approximate number of tokens per minibatch; None = the whole rollout at once.
        """
        return islice(buffer.get(batch_size), self.n_done, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, in JSON's types."""
        return {"epoch": self.epoch, "n_done": self.n_done, "order": self._order, "n_steps": len(self.steps)}

    def logged(self, n_steps: int) -> dict[str, Tensor]:
        """Return the logged scalars of the first `n_steps` steps, by `<step>.<name>`."""
        tensors: dict[str, Tensor] = {}
        for index, step in enumerate(self.steps[:n_steps]):
            tensors |= {f"{index}.{name}": value.detach() for name, value in step.items()}
        return tensors

    def load_state_dict(self, state: dict[str, Any], logged: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `state_dict` and `logged`."""
        self.is_prepared = True
        self.can_go_on = True
        self.epoch = state["epoch"]
        self.n_done = state["n_done"]
        self._order = state["order"]
        self.steps = [{} for _ in range(state["n_steps"])]
        for key, value in logged.items():
            index, _, name = key.partition(".")
            self.steps[int(index)][name] = value
