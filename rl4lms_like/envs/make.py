"""Vectorised environment selected by `env.vec_env` in a config.

text      TextVecEnv             one process, whole episodes; `reward_workers` processes may score them
dummy     SB3's DummyVecEnv      one process, token by token
subproc   SB3's SubprocVecEnv    one process per environment, token by token
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any, Literal

from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rl4lms_like.core.errors import ConfigError, ConfigIssue, RL4LMsLikeError
from rl4lms_like.core.wording import raised
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.stepping import EnvInProcess, ProcessVecEnv
from rl4lms_like.envs.vec_env import TextVecEnv


def make_vec_env(kind: Literal["text", "dummy", "subproc"] = "text", n_envs: int = 1, **env_kwargs: Any) -> VecEnv:
    """Build a vectorised environment.

    Args:
        kind: `text`, `dummy` or `subproc`; see the table of this module.
        n_envs: number of parallel episodes.
        env_kwargs: the arguments of `TextGenEnv`; for `text` those of `TextVecEnv`, such as `reward_workers`.

    Raises:
        ConfigError: the kind is unknown.
        RL4LMsLikeError: the operating system cannot start the processes.
    """
    if kind == "text":
        return TextVecEnv(n_envs, **env_kwargs)
    if kind == "dummy":
        return DummyVecEnv([partial(TextGenEnv, **env_kwargs)] * n_envs)
    if kind == "subproc":
        try:
            return ProcessVecEnv([partial(EnvInProcess, **env_kwargs)] * n_envs)
        except (OSError, EOFError) as error:
            raise RL4LMsLikeError(
                f"the {n_envs} processes of vec_env 'subproc' cannot be started: {raised(error)}. Check the limit on "
                f"processes and the length of TMPDIR ({tempfile.gettempdir()}), or use vec_env 'text'"
            ) from error
    raise ConfigError([ConfigIssue("vec_env", f"expected text, dummy or subproc, got {kind!r}")])
