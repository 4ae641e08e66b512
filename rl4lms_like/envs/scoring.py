"""Scoring of finished episodes as configured by `env`: in this process or by workers, within the time limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.envs.workers import RewardWorkers
from rl4lms_like.rewards.base import AnyReward
from rl4lms_like.rewards.call import TokenRewards, score_episodes_in_parts
from rl4lms_like.rewards.time_limit import TimeIsUp, check_time_limit, within
from rl4lms_like.system.component_state import load_state, state_of
from rl4lms_like.system.errors import RewardError


class EpisodeScorer:
    """Computes the rewards of finished episodes.

    Args:
        reward_fn: the task's reward.
        layout: shapes and tokenizer of the observations.
        n_workers: number of processes that compute the rewards; 0 computes them in this process.
        timeout: time limit in seconds for the episodes of one call, with workers for one worker's chunk of them; None
            for no limit.

    Raises:
        ConfigError: the time limit requires workers here.
        RewardError: there are workers, and the reward cannot be sent to another process.
    """

    def __init__(
        self, reward_fn: AnyReward, layout: TextLayout, n_workers: int = 0, timeout: float | None = None
    ) -> None:
        # Without workers the time limit is a signal's, which not every system and thread has.
        if not n_workers:
            check_time_limit(timeout)
        self.reward_fn = reward_fn
        self._timeout = timeout
        # Prompts are encoded here: workers need no encoder of pictures, which has their tensors.
        self._workers: RewardWorkers | None = None
        if n_workers:
            self._workers = RewardWorkers(reward_fn, replace(layout, pictures=None), n_workers, timeout)

    def score(self, final_states: Sequence[Observation], *, keeps_state: bool = False) -> TokenRewards:
        """Return the reward of every token of some episodes, given by their last observations.

        With `keeps_state` the state of the reward is afterwards what it was before, here and in the workers.

        Raises:
            RewardError: the reward failed.
        """
        if self._workers is not None:
            return self._workers.score(final_states, keeps_state=keeps_state)

        state = state_of(self.reward_fn) if keeps_state else None
        try:
            return within(self._timeout, lambda: score_episodes_in_parts(self.reward_fn, final_states))
        except TimeIsUp as error:  # raised between two calls of the reward, hence not attributed to a sample
            name = type(self.reward_fn).__name__
            raise RewardError(f"{name} failed on a batch of {len(final_states)}: {error}") from error
        finally:
            if state is not None:
                load_state(self.reward_fn, state)

    @property
    def restarts(self) -> int | None:
        """Number of restarts of the workers; None without workers."""
        return None if self._workers is None else self._workers.restarts

    def close(self) -> None:
        """Stop the workers, if there are any."""
        if self._workers is not None:
            self._workers.close()
