"""Environments that are stepped token by token, in this process or in one process each; the choice between all kinds.

make_vec_env        the vectorised environment selected by `env.vec_env` in a config

    text      TextVecEnv             one process, whole episodes; `reward_workers` processes may score them
    dummy     SB3's DummyVecEnv      one process, token by token
    subproc   ProcessVecEnv          one process per environment, token by token

play_by_stepping    the rewards of `TextVecEnv.play` from any vectorised `TextGenEnv`

    step       0  1  2  3
    episode 0  a  b  .  .      . idle token for an environment that is already done; its results are ignored
    episode 1  a  b  c  d

ProcessVecEnv       Stable-Baselines3's `SubprocVecEnv` with attributed errors of the reward

    process    step -- the reward fails --> reward NaN, info["reward_error"]      (SB3's process would exit)
    parent     play_by_stepping raises this as a `RewardError`; a process that ended raises an `EndedError`
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from itertools import count
from typing import Any, Literal, TypeVar

import numpy as np
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from rl4lms_like.core.episodes import EpisodeBatch, real_ids
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.envs.env import REWARD_PARTS, TextGenEnv
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.rewards.call import TokenRewards, texts_to_score
from rl4lms_like.system.errors import ConfigError, ConfigIssue, RewardError, RL4LMsLikeError
from rl4lms_like.system.wording import raised

T = TypeVar("T")

REWARD_ERROR = "reward_error"
"""Key of `info`: the error message of the reward."""


class EndedError(RewardError):
    """Error raised when a process of the environments has ended."""


def _attributed(method: Callable[..., T]) -> Callable[..., T]:
    # A process that ended leaves a broken pipe; SB3's `EOFError` would not say whose it was.
    @wraps(method)
    def wrapper(self: SubprocVecEnv, *args: Any, **kwargs: Any) -> T:
        try:
            return method(self, *args, **kwargs)
        except (EOFError, ConnectionError) as error:
            raise EndedError(
                f"one of the {self.num_envs} processes of vec_env 'subproc' ended: killed from outside (out of "
                "memory?) or by the reward itself. With vec_env 'text', env.reward_workers are restarted"
            ) from error

    wrapper.__doc__ = f"Call `SubprocVecEnv.{method.__name__}`; raises an `EndedError` if a process has ended."
    return wrapper


class ProcessVecEnv(SubprocVecEnv):
    """`SubprocVecEnv` that can be closed at any time: during a step, or after one of its processes has ended."""

    step_async = _attributed(SubprocVecEnv.step_async)
    step_wait = _attributed(SubprocVecEnv.step_wait)
    reset = _attributed(SubprocVecEnv.reset)
    get_attr = _attributed(SubprocVecEnv.get_attr)
    env_method = _attributed(SubprocVecEnv.env_method)

    def close(self) -> None:
        """Stop the processes."""
        # SB3's `close` waits for the step in progress and sends a message to each process: either could block or fail
        # here. With `closed` set it does nothing.
        if not self.closed and (self.waiting or not all(process.is_alive() for process in self.processes)):
            for process in self.processes:
                process.kill()
                process.join()
            for remote in self.remotes:
                remote.close()
            self.waiting = False
            self.closed = True
        super().close()


class EnvInProcess(TextGenEnv):
    """`TextGenEnv` for a subprocess that survives failures of the reward and ignores signals from the terminal."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if multiprocessing.parent_process() is not None:
            # Ctrl-C and the hangup of a closing terminal reach all processes; the parent handles them.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if hasattr(signal, "SIGHUP"):  # not on Windows
                signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Call `TextGenEnv.reset` and seed the process's random generators for the reward.

        The seed is derived from the sampler's state, which depends on the run's seed and is part of every checkpoint.
        """
        results = super().reset(seed=seed, options=options)

        # Only in a process of its own: in the parent, the global generators are those of the run.
        if multiprocessing.parent_process() is not None:
            position = self.sampler.state_dict()["generator"]["state"]["state"]
            set_random_seed(derived_seed(0, "reward in a process", position))
        return results

    def step(self, action: np.int64 | int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Call `TextGenEnv.step`; if the reward fails, return NaN, end the episode and put the error into `info`."""
        try:
            return super().step(action)
        except RewardError as error:
            # An exception would end the process, and the parent would see a broken pipe instead of the error.
            self.leave()
            return self.observation.to_dict(), float("nan"), False, True, {REWARD_ERROR: str(error)}


def play_by_stepping(vec_env: VecEnv, episodes: EpisodeBatch) -> TokenRewards:
    """Compute the task rewards of whole responses by stepping a `DummyVecEnv` or `SubprocVecEnv` of `TextGenEnv`.

    The environments reset automatically when they are done, so call `reset` before the next episodes.

    Args:
        vec_env: environments that were just reset; the responses belong to their current prompts.
        episodes: one for each environment, in their order.

    Returns:
        Flat `[n_tokens]` float32, and the contribution of each part of a combined reward, from the steps' `info`.

    Raises:
        ValueError: an episode does not end where its environment does. Stepping cannot compute the final reward of an
            episode that stops before `max_episode_length` without EOS.
        RewardError: the reward failed, or a process of the environments ended.
    """
    samples = vec_env.get_attr("sample")  # fetched first, because environments reset to the next sample when done
    try:
        return _step_through(vec_env, episodes)
    except EndedError:  # the environments cannot be queried any more
        raise
    except RewardError as error:
        prompts = real_ids(episodes.prompt_ids, episodes.prompt_mask)
        responses = real_ids(episodes.response_ids, episodes.response_mask)
        (layout,) = vec_env.get_attr("layout", indices=[0])
        error.texts = texts_to_score(samples, layout.continuations.texts(prompts, responses))
        raise


def _step_through(vec_env: VecEnv, episodes: EpisodeBatch) -> TokenRewards:
    lengths = episodes.lengths.cpu().numpy()  # [n_envs]
    if len(lengths) != vec_env.num_envs:
        raise ValueError(f"expected {vec_env.num_envs} episodes, one for each environment, got {len(lengths)}")
    responses = episodes.response_ids.cpu().numpy()  # [n_envs, response_len], right-padded

    # An environment that is done has reset itself and is in an episode of the next sample, which a step would continue.
    # The idle token does not end it, so that a terminal reward is not called for it (before the length limit).
    end_tokens = vec_env.get_attr("eos_token_ids", indices=[0])[0]
    idle_token = next(token for token in count() if token not in end_tokens)

    # Flat results `[n_tokens]`: token `step` of an episode is at the episode's offset plus `step`.
    offsets = np.cumsum(lengths) - lengths
    rewards = np.zeros(lengths.sum(), dtype=np.float32)
    reward_parts: dict[str, np.ndarray] = {}
    for step in range(lengths.max()):
        is_running = step < lengths
        _, step_rewards, dones, infos = vec_env.step(np.where(is_running, responses[:, step], idle_token))
        rewards[offsets[is_running] + step] = step_rewards[is_running]

        for episode in np.flatnonzero(is_running):
            if REWARD_ERROR in infos[episode]:
                raise RewardError(infos[episode][REWARD_ERROR])
            for name, value in infos[episode].get(REWARD_PARTS, {}).items():
                part = reward_parts.setdefault(name, np.zeros(len(rewards)))  # 0 where the part had no value
                part[offsets[episode] + step] = value
        _check_ends(is_running, is_last=lengths == step + 1, dones=dones, n_actions=step + 1)
    return TokenRewards(rewards, reward_parts)


def _check_ends(is_running: np.ndarray, is_last: np.ndarray, dones: np.ndarray, n_actions: int) -> None:
    """Raise a `ValueError` if an environment is done where its response goes on, or the reverse; masks `[n_envs]`."""
    for episode in np.flatnonzero(is_running & (is_last != dones)):
        if is_last[episode]:
            raise ValueError(
                f"episode {episode} stops after {n_actions} tokens, but its environment does not: let generation "
                "continue to max_episode_length or EOS, or use the vectorised environment 'text'"
            )
        raise ValueError(f"episode {episode} continues after {n_actions} tokens, but its environment has ended")


def make_vec_env(kind: Literal["text", "dummy", "subproc"] = "text", n_envs: int = 1, **env_kwargs: Any) -> VecEnv:
    """Build a vectorised environment.

    Args:
        kind: `text`, `dummy` or `subproc`; see the table in this module.
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
