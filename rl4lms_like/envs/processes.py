"""Stable-Baselines3's `SubprocVecEnv` (one process per environment) with attributed errors of the reward.

process    step -- the reward fails --> reward NaN, info["reward_error"]     (SB3's process would exit with a traceback)
parent     play_by_stepping raises this as a `RewardError`; a process that ended raises an `EndedError`
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import SubprocVecEnv

from rl4lms_like.core.errors import RewardError
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.envs.env import TextGenEnv

T = TypeVar("T")

REWARD_ERROR = "reward_error"
"""Key of `info`: the error message of the reward."""


class EndedError(RewardError):
    """Error raised when a process of the environments has ended."""


def _attributed(method: Callable[..., T]) -> Callable[..., T]:
    @wraps(method)
    def wrapper(self: SubprocVecEnv, *args: Any, **kwargs: Any) -> T:
        try:
            return method(self, *args, **kwargs)
        except (EOFError, ConnectionError) as error:
            raise EndedError(
                f"one of the {self.num_envs} processes of vec_env 'subproc' ended: killed from outside (out of "
                "memory?) or by the reward itself. With vec_env 'text', env.reward_workers are restarted"
            ) from error

    return wrapper


class ProcessVecEnv(SubprocVecEnv):
    """`SubprocVecEnv` that can be closed at any time: during a step, or after one of its processes has ended.

    In the second case all other methods raise an `EndedError`.
    """

    step_async = _attributed(SubprocVecEnv.step_async)
    step_wait = _attributed(SubprocVecEnv.step_wait)
    reset = _attributed(SubprocVecEnv.reset)
    get_attr = _attributed(SubprocVecEnv.get_attr)
    env_method = _attributed(SubprocVecEnv.env_method)

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
