"""Progress of an update, so that an interrupted update can resume with its next minibatch.

    rollout ─ update begins ─ epoch 1: m m m m ─ epoch 2: m m | m m
                                                              epoch 2, 2 done

On resuming, the order of the epoch is sampled again from the same random state, and finished minibatches are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Any

from torch import Tensor

from rl4lms_like.rollouts.buffer import EpisodeBuffer, Minibatch

Logged = dict[str, Tensor]
"""Logged scalars of a step, by name."""


class UpdateStage(Enum):
    """Stage of an update, which decides whether a run that ends now can resume it.

    new ─ between_steps ─ in_step ─ between_steps ─ ... ─ between_steps ─ finished ─ weights_changed
    """

    NEW = "new"
    """The rollout is complete, but not yet prepared for the steps (its advantages are not normalised, for instance)."""
    BETWEEN_STEPS = "between_steps"
    """The weights are those after a whole number of steps: the update can be resumed."""
    IN_STEP = "in_step"
    """A step may have changed some of the weights: the update cannot be resumed before the step ends."""
    FINISHED = "finished"
    """All steps are taken, and the weights are still those after the last one: resuming takes no further step."""
    WEIGHTS_CHANGED = "weights_changed"
    """After the steps, something else has changed weights, such as an update of the reference: cannot be resumed."""


class UpdateProgress:
    """Progress of an update.

    Attributes:
        stage: see `UpdateStage`.
        epoch: current pass over the rollout, from 1; 0 = none yet.
        n_done: number of finished minibatches of this pass.
        steps: logged scalars of each step so far.
    """

    def __init__(self) -> None:
        self.stage = UpdateStage.NEW
        self.epoch = 0
        self.n_done = 0
        self.steps: list[Logged] = []
        self._order: dict[str, Any] = {}  # state of the buffer's generator at the start of the current pass

    @property
    def is_resumable(self) -> bool:
        """True if a run that ends now can resume the update: no step has changed only part of the weights."""
        return self.stage in (UpdateStage.BETWEEN_STEPS, UpdateStage.FINISHED)

    @property
    def is_finished(self) -> bool:
        """True once all steps of the update are taken."""
        return self.stage in (UpdateStage.FINISHED, UpdateStage.WEIGHTS_CHANGED)

    def weights_change(self) -> None:
        """Record that weights are about to change: until the end of the step, the update cannot be resumed."""
        self.stage = UpdateStage.WEIGHTS_CHANGED if self.is_finished else UpdateStage.IN_STEP

    def remaining(
        self, buffer: EpisodeBuffer, n_epochs: int, batch_size: int | None, minibatch_episodes: int | None = None
    ) -> Iterator[tuple[int, Minibatch]]:
        """Iterate over the minibatches that remain of `n_epochs` passes, each with the number of its pass.

        The caller counts the minibatches that are done (`n_done`).

        Args:
            buffer: contains the rollout.
            n_epochs: number of passes over it.
            batch_size: approximate number of tokens per minibatch; None = the whole rollout at once.
            minibatch_episodes: number of episodes per minibatch, in place of a number of tokens.
        """
        # The interrupted pass draws its minibatches again, in the same order, and skips those that are done.
        if self.epoch:
            buffer.load_state_dict(self._order)
        for epoch in range(max(self.epoch, 1), n_epochs + 1):
            self.epoch = epoch
            self._order = buffer.state_dict()
            for minibatch in islice(buffer.get(batch_size, minibatch_episodes), self.n_done, None):
                yield epoch, minibatch

            # After the last pass the count stays: an update that is finished has no minibatch left on resuming.
            if epoch < n_epochs:
                self.n_done = 0

    # --- checkpoints ------------------------------------------------------------------------------------------------

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
        self.stage = UpdateStage.BETWEEN_STEPS
        self.epoch = state["epoch"]
        self.n_done = state["n_done"]
        self._order = state["order"]
        self.steps = [{} for _ in range(state["n_steps"])]
        for key, value in logged.items():
            index, _, name = key.partition(".")
            self.steps[int(index)][name] = value
