"""Where an update stands, so that one that is stopped goes on with its next minibatch.

    rollout ─ update begins ─ epoch 1: m m m m ─ epoch 2: m m | m m
                                                              epoch 2, 2 done

The order of an epoch is drawn again from the random numbers that it was drawn from, and what is done is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from rl4lms_like.rollouts.buffer import EpisodeBuffer, Minibatch

Logged = dict[str, Tensor]
"""What is logged of a step, by name; single numbers."""


class UpdateProgress:
    """What is done of an update.

    Attributes:
        has_begun: whether the rollout is as the steps see it (its advantages normalised, for instance).
        can_go_on: whether the weights are those after a whole number of steps.
        is_over: whether nothing is left to do.
        epoch: the pass over the rollout that is under way, from 1; 0 = none yet.
        n_done: minibatches of it that are done.
        steps: what is logged of each step so far.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.can_go_on = False
        self.is_over = False
        self.epoch = 0
        self.n_done = 0
        self.steps: list[Logged] = []
        self._order: dict[str, Any] = {}

    def minibatches(
        self, buffer: EpisodeBuffer, n_epochs: int, batch_size: int | None, done: Callable[[], None]
    ) -> Iterator[Minibatch]:
        """The minibatches that are still to do, of all epochs.

        Args:
            buffer: with the rollout.
            n_epochs: passes over it.
            batch_size: tokens per minibatch, about; None = the whole rollout at once.
            done: called after each.
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
        """Where it stands, in JSON's types."""
        return {"epoch": self.epoch, "n_done": self.n_done, "order": self._order, "n_steps": len(self.steps)}

    def logged(self, n_steps: int) -> dict[str, Tensor]:
        """What is logged of the first `n_steps` steps, by `<step>.<name>`."""
        steps = enumerate(self.steps[:n_steps])
        return {f"{index}.{name}": value.detach() for index, step in steps for name, value in step.items()}

    def load_state_dict(self, state: dict[str, Any], logged: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` and `logged` gave."""
        self.has_begun = self.can_go_on = True
        self.epoch, self.n_done, self._order = state["epoch"], state["n_done"], state["order"]
        self.steps = [{} for _ in range(state["n_steps"])]
        for key, value in logged.items():
            index, _, name = key.partition(".")
            self.steps[int(index)][name] = value
