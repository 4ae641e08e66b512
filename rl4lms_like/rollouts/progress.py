"""Progress of an update, so that an interrupted update can resume with its next minibatch.

    rollout ─ update begins ─ epoch 1: m m m m ─ epoch 2: m m | m m
                                                              epoch 2, 2 done

On resuming, the order of the epoch is sampled again from the same random state, and finished minibatches are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

    def minibatches(
        self, buffer: EpisodeBuffer, n_epochs: int, batch_size: int | None, done: Callable[[], None]
    ) -> Iterator[Minibatch]:
        """Iterate over the remaining minibatches of all epochs.

        Args:
            buffer: contains the rollout.
            n_epochs: number of passes over it.
            batch_size: approximate number of tokens per minibatch; None = the whole rollout at once.
            done: called after each minibatch.
        """
        if self.epoch:
            buffer.load_state_dict(self._order)
        for epoch in range(max(self.epoch, 1), n_epochs + 1):
            self.epoch, self._order = epoch, buffer.state_dict()
            for minibatch in islice(buffer.get(batch_size), self.n_done, None):
                yield minibatch
                self.n_done += 1
                done()
            if epoch < n_epochs:
                self.n_done = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, in JSON's types."""
        return {"epoch": self.epoch, "n_done": self.n_done, "order": self._order, "n_steps": len(self.steps)}

    def logged(self, n_steps: int) -> dict[str, Tensor]:
        """Return the logged scalars of the first `n_steps` steps, by `<step>.<name>`."""
        steps = enumerate(self.steps[:n_steps])
        return {f"{index}.{name}": value.detach() for index, step in steps for name, value in step.items()}

    def load_state_dict(self, state: dict[str, Any], logged: Mapping[str, Tensor]) -> None:
        """Restore the state returned by `state_dict` and `logged`."""
        self.is_prepared = self.can_go_on = True
        self.epoch, self.n_done, self._order = state["epoch"], state["n_done"], state["order"]
        self.steps = [{} for _ in range(state["n_steps"])]
        for key, value in logged.items():
            index, _, name = key.partition(".")
            self.steps[int(index)][name] = value
