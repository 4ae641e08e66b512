"""The vectorised environment a config asks for by `env.vec_env`.

text      TextVecEnv             one process, whole episodes; `reward_workers` processes may score them
dummy     SB3's DummyVecEnv      one process, token by token
subproc   SB3's SubprocVecEnv    one process an environment, token by token
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.envs.env import TextGenEnv
from rl4lms_like.envs.vec_env import TextVecEnv


def make_vec_env(
    kind: Literal["text", "dummy", "subproc"] = "text", n_envs: int = 1, reward_workers: int = 0, **env_kwargs: Any
) -> VecEnv:
    """Builds a vectorised environment.

    Args:
        kind: see above.
        n_envs: episodes at a time.
        reward_workers: processes that score episodes, for `text` only.
        env_kwargs: the arguments of `TextGenEnv`.

    Raises:
        ConfigError: `reward_workers` does not go with `kind`, or there is no such kind.
    """
    if kind == "text":
        return TextVecEnv(n_envs, reward_workers=reward_workers, **env_kwargs)
    if reward_workers:
        said = f"goes with vec_env 'text' only, got {kind!r}, which calls the reward where it steps"
        raise ConfigError([Mistake("reward_workers", said)], "the environment's arguments")
    vectorised = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}
    if kind not in vectorised:
        raise ConfigError([Mistake("vec_env", f"expected text, dummy or subproc, got {kind!r}")])
    return vectorised[kind]([partial(TextGenEnv, **env_kwargs)] * n_envs)
