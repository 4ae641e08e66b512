"""Stable-Baselines3's `SubprocVecEnv` (one process per environment) with attributed errors of the reward.

process    step -- the reward fails --> reward NaN, info["reward_error"]     (SB3's process would exit with a traceback)
parent     play_by_stepping raises this as a `RewardError`; a process that ended raises an `EndedError`
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
"""Key of `info`: the error message of the reward."""


class EndedError(RewardError):
    """Error raised when a process of the environments has ended."""


class ProcessVecEnv(SubprocVecEnv):
    """`SubprocVecEnv` that can be closed at any time: during a step, or after one of its processes has ended."""

    def step_async(self, actions: np.ndarray) -> None:
        """Call the base class's method, like the overrides below.

        Raises:
            EndedError: a process ended or was killed.
        """
        with self._all_there():
            super().step_async(actions)

    def step_wait(self) -> Any:
        """Call the base class's method."""
        with self._all_there():
            return super().step_wait()

    def reset(self) -> Any:
        """Call the base class's method."""
        with self._all_there():
            return super().reset()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Call the base class's method."""
        with self._all_there():
            return super().get_attr(attr_name, indices)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call the base class's method."""
        with self._all_there():
            return super().env_method(method_name, *args, indices=indices, **kwargs)

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise EndedError(
                f"one of the {self.num_envs} processes of vec_env 'subproc' ended: killed from outside (out of "
                "memory?) or by the reward itself. With vec_env 'text', env.reward_workers are restarted"
            ) from error

    def close(self) -> None:
        """Stop the processes."""
        if not self.closed and (self.waiting or not all(process.is_alive() for process in self.processes)):
            for process in self.processes:
                process.kill()
                process.join()
            for remote in self.remotes:
                remote.close()
            self.waiting, self.closed = False, True
        super().close()


class EnvInProcess(TextGenEnv):
    """`TextGenEnv` for a subprocess that survives failures of the reward and ignores the parent's Ctrl-C."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Call `TextGenEnv.reset` and seed the process's random generators for the reward.

        The seed is derived from the sampler's state, which depends on the run's seed and is part of every checkpoint.
        """
        begun = super().reset(seed=seed, options=options)
        if multiprocessing.parent_process() is not None:
            place = self.sampler.state_dict()["generator"]["state"]["state"]
            set_random_seed(derived_seed(0, "reward in a process", place))
        return begun

    def step(self, action: np.int64 | int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Call `TextGenEnv.step`; if the reward fails, return NaN, end the episode and put the error into `info`."""
        try:
            return super().step(action)
        except RewardError as error:
            self.leave()
            return self.observation.to_dict(), float("nan"), False, True, {REWARD_ERROR: str(error)}
