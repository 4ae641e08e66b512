"""Stable-Baselines3's one process an environment, in which a failure of the reward comes back by name.

process    step -- the reward fails --> reward NaN, info["reward_error"]     (SB3's would end, with a traceback)
parent     play_by_stepping raises that as a `RewardError`; whatever finds that a process ended raises one too
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import SubprocVecEnv

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.envs.env import TextGenEnv

REWARD_ERROR = "reward_error"
"""Key of `info`: what the reward failed with."""


class EndedError(RewardError):
    """A process of the environments is no longer there."""


class ProcessVecEnv(SubprocVecEnv):
    """A `SubprocVecEnv` that can be closed whatever its processes do: in the midst of a step, or when one has ended."""

    def step_async(self, actions: np.ndarray) -> None:
        """As the parent's, like all below.

        Raises:
            EndedError: a process ended, or was ended.
        """
        with self._all_there():
            super().step_async(actions)

    def step_wait(self) -> Any:
        """As the parent's."""
        with self._all_there():
            return super().step_wait()

    def reset(self) -> Any:
        """As the parent's."""
        with self._all_there():
            return super().reset()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """As the parent's."""
        with self._all_there():
            return super().get_attr(attr_name, indices)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """As the parent's."""
        with self._all_there():
            return super().env_method(method_name, *args, indices=indices, **kwargs)

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise EndedError(
                f"one of the {self.num_envs} processes of vec_env 'subproc' ended: killed from outside (memory?) or by "
                "the reward itself. With vec_env 'text', env.reward_workers start again"
            ) from error

    def close(self) -> None:
        """Ends the processes."""
        if not self.closed and (self.waiting or not all(process.is_alive() for process in self.processes)):
            for process in self.processes:
                process.kill()
                process.join()
            for remote in self.remotes:
                remote.close()
            self.waiting, self.closed = False, True
        super().close()


class EnvInProcess(TextGenEnv):
    """A `TextGenEnv` for a process of its own, which is not ended by its reward or by the parent's Ctrl-C."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the run decides

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """As `TextGenEnv`'s; what a reward then draws from the process's generators follows from the prompt's place.

        The place in the sequence of prompts comes from the run's seed, and is part of every checkpoint.
        """
        begun = super().reset(seed=seed, options=options)
        if multiprocessing.parent_process() is not None:
            place = self.sampler.state_dict()["generator"]["state"]["state"]
            set_random_seed(derived_seed(0, "reward in a process", place))
        return begun

    def step(self, action: np.int64 | int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """As `TextGenEnv`'s; where the reward fails it pays NaN, ends the episode and says why in `info`."""
        try:
            return super().step(action)
        except RewardError as error:
            self.leave()
            return self.observation.to_dict(), float("nan"), False, True, {REWARD_ERROR: str(error)}
