"""Callbacks of users in a run: their calls, the numbers they return, their states, and their exceptions.

An exception of a callback does not end the run at once, where work would be lost, but at the next point from which the
run can be resumed:

    on_rollout_end     before the first step of the update, which resumes with the same rollout
    on_iteration_end   after the iteration (RL), or after the evaluation and checkpoint of the step (offline)
    on_evaluation_end  after the scores are logged
    on_save            after the folder is complete

A resumed run does not repeat the call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl4lms_like.callbacks.base import Callback, RunContext
from rl4lms_like.config.binding import name_of
from rl4lms_like.config.run_config import AnyConfig
from rl4lms_like.system.component_state import not_json
from rl4lms_like.system.errors import ComponentError
from rl4lms_like.system.functions import short_name
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.secrets import secret_in
from rl4lms_like.system.wording import raised

logger = logging.getLogger(__name__)

PREFIX = "callback"
"""Numbers are logged as `callback/<name>/<key>`."""


class UserCallbacks(Callback):
    """The callbacks of `train_evaluation.callbacks`, in their order, as one callback.

    Args:
        callbacks: by name.
        context: objects of the run.
        ranks: the processes that train together. All call the callbacks, except `on_save`, which the main one calls.
    """

    def __init__(self, callbacks: Mapping[str, Callback], context: RunContext, ranks: Ranks) -> None:
        self.callbacks = callbacks
        self.ranks = ranks
        self.numbers: dict[str, float] = {}  # returned since `pop_numbers`, by the key under which they are logged
        self.failure: ComponentError | None = None
        for callback in callbacks.values():
            callback.run = context

    def on_rollout_end(self, iteration: int, rollout: Any) -> None:
        self._call_all("on_rollout_end", f"of iteration {iteration}", iteration, rollout)

    def on_iteration_end(self, iteration: int) -> None:
        self._call_all("on_iteration_end", str(iteration), iteration)

    def on_evaluation_end(self, epoch: float, split: str, evaluation: Any) -> None:
        self._call_all("on_evaluation_end", f"of {split!r} at epoch {epoch}", epoch, split, evaluation)

    def on_save(self, folder: Path) -> None:
        self._call_all("on_save", f"of {folder.name}", folder)

    def _call_all(self, method: str, when: str, *arguments: Any) -> None:
        """Call a method of each callback; keep the first exception for `check`."""
        for name in self.callbacks:
            try:
                with self._attributed(name, f"{method} {when}"):
                    numbers = _checked(getattr(self.callbacks[name], method)(*arguments))
            except ComponentError as failure:
                self.failure = self.failure or failure
                continue
            for key, value in numbers.items():
                self.numbers[f"{PREFIX}/{name}/{key}"] = value

    @contextmanager
    def _attributed(self, name: str, where: str) -> Iterator[None]:
        """Raise a `ComponentError` that names the callback in place of an exception of its code."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also `SystemExit`, which would end the run and name no callback
            raise ComponentError(f"the callback {name!r} failed in {where}: {raised(error)}") from error

    def check(self) -> None:
        """Raise the exception of a callback, if there was one, in all processes.

        Raises:
            ComponentError: names the callback and its method.
            RankError: a callback failed in another process.
        """
        failure = self.failure
        self.failure = None

        def raise_own() -> None:
            if failure is not None:
                raise failure

        if self.callbacks:  # as many exchanges in all processes, which have the same callbacks
            self.ranks.gather_from(raise_own)

    def warn(self) -> None:
        """Log the exception of a callback that was called while a run is saved which ends with another error."""
        if self.failure is not None:
            logger.warning("%s", self.failure)

    def pop_numbers(self) -> dict[str, float]:
        """Return the numbers since the last call, by key; a later one has replaced an earlier one."""
        numbers = self.numbers
        self.numbers = {}
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback, and the numbers that are not logged yet.

        Raises:
            ComponentError: a state does not survive a round trip through JSON, or contains a secret.
        """
        states = {}
        for name, callback in self.callbacks.items():
            with self._attributed(name, "state_dict"):
                state = callback.state_dict()

            # Written as JSON, next to the weights, where others may read it.
            message = not_json(state)
            if message is None and (key := secret_in(state)):
                message = f"{key} contains a secret, which every checkpoint would contain"
            if message is not None:
                raise ComponentError(f"the state_dict() of the callback {name!r} cannot be saved: {message}")
            states[name] = state
        return {"states": states, "numbers": dict(self.numbers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`; a callback that the run did not have before begins anew.

        Raises:
            ComponentError: a callback failed.
        """
        self.numbers = dict(state["numbers"])
        for name, callback in self.callbacks.items():
            if name in state["states"]:
                with self._attributed(name, "load_state_dict"):
                    callback.load_state_dict(state["states"][name])


def callback_names(config: AnyConfig) -> list[str]:
    """Return the names of the callbacks of a config: their ids, or classes; equal ones are numbered."""
    names: list[str] = []
    for block in config.train_evaluation.callbacks:
        first_name = name_of(block.id)
        if block.id == "object":
            first_name = short_name(str(block.args["object"]))
        name = first_name
        number = 1
        while name in names:
            number += 1
            name = f"{first_name}_{number}"
        names.append(name)
    return names


def user_callbacks(
    config: AnyConfig, callbacks: Sequence[Callback], context: RunContext, ranks: Ranks
) -> UserCallbacks:
    """Return the callbacks of a run, which were built from its config."""
    return UserCallbacks(dict(zip(callback_names(config), callbacks, strict=True)), context, ranks)


def _checked(numbers: Any) -> dict[str, float]:
    """Return what a method returned as numbers by key."""
    if numbers is None:
        return {}
    if not isinstance(numbers, Mapping):
        raise TypeError(f"expected a dictionary of numbers or None, got {numbers!r:.60}")
    for key, value in numbers.items():
        if isinstance(value, str):  # `float` would accept it
            raise TypeError(f"expected a number as {key!r}, got {value!r:.60}")
    return {str(key): float(value) for key, value in numbers.items()}
