"""Value pretraining (VC-PPO, arXiv 2503.01491): the critic learns the returns of the starting policy.

rollout ─ Monte-Carlo returns ─ explained variance ─ passes of the critic     until it no longer rises
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rl4lms_like.algorithms.arguments import CriticPretraining
from rl4lms_like.core.interruption import Interruption
from rl4lms_like.core.losses import explained_variance
from rl4lms_like.core.out_of_memory import blame_memory_errors_on
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.rollouts.buffer import EpisodeBuffer
from rl4lms_like.rollouts.progress import UpdateProgress

if TYPE_CHECKING:
    from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm


class CriticPretrainer:
    """Trains the critic of an algorithm on rollouts of its policy, which is not changed.

    Args:
        settings: see `CriticPretraining`.

    Attributes:
        explained: explained variance of each rollout's returns, before the critic was trained on it.
        n_tokens: number of tokens of the rollouts. They do not count as time steps of the training.
    """

    def __init__(self, settings: CriticPretraining) -> None:
        self.settings = settings
        self.explained: list[float] = []
        self.n_tokens = 0

    @property
    def is_over(self) -> bool:
        """True after `max_rollouts`, or if the last `patience` rollouts explained no more than those before."""
        done, patience = len(self.explained), self.settings.patience
        if done >= self.settings.max_rollouts:
            return True
        known = [-math.inf if math.isnan(value) else value for value in self.explained]
        best = max(known[: done - patience], default=-math.inf)
        return done > patience and max(known[done - patience :]) < best + self.settings.min_gain

    def rollouts(self, algorithm: OnPolicyTextAlgorithm, interruption: Interruption | None = None) -> Iterator[float]:
        """Run the remaining rollouts and updates; yield each explained variance. The run can be resumed from there.

        Args:
            algorithm: its policy has a separate critic.
            interruption: of the training loop.
        """
        interruption = interruption or Interruption()
        options = algorithm.arguments
        n_tokens = options.n_steps * algorithm.collector.n_envs
        while not self.is_over:
            buffer = EpisodeBuffer(device=algorithm.device, gamma=options.gamma, gae_lambda=1.0)
            buffer.seed(derived_seed(algorithm.sampling_seed, "critic pretraining", len(self.explained)))
            algorithm.policy.set_training_mode(False)
            with interruption.at_any_moment():
                algorithm.collector.collect(buffer, n_tokens, updates_policy=False)
            with interruption.finishing("this update of the critic"), blame_memory_errors_on("update"):
                algorithm.update_progress = UpdateProgress()  # weights change: the run cannot be resumed before the end
                self._train(algorithm, buffer)
                algorithm.update_progress = None
            values, returns = torch.as_tensor(buffer.values), torch.as_tensor(buffer.returns)
            self.explained.append(explained_variance(values, returns))
            self.n_tokens += buffer.n_tokens
            yield self.explained[-1]

    def progress(self, explained: float) -> str:
        """Return a line that describes the last rollout."""
        done, most = len(self.explained), self.settings.max_rollouts
        return f"critic, rollout {done} of at most {most}: explained variance {explained:.3f}"

    def _train(self, algorithm: OnPolicyTextAlgorithm, buffer: EpisodeBuffer) -> None:
        rate = self.settings.learning_rate
        algorithm.policy.set_training_mode(True)
        if rate is None:
            rate = algorithm.lr_schedule(1.0) * algorithm.critic_factor
        for group in algorithm.policy.optimizer.param_groups:
            group["lr"] = rate
        steps = 0
        for _ in range(self.settings.n_epochs):
            for minibatch in buffer.get(algorithm.batch_size):
                algorithm.critic_step(minibatch)
                steps += 1
        algorithm.policy.optimizer.zero_grad()
        algorithm.guard.end_update(steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the pretraining, in JSON's types."""
        explained = [None if math.isnan(value) else value for value in self.explained]
        return {"explained": explained, "n_tokens": self.n_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.explained = [math.nan if value is None else value for value in state["explained"]]
        self.n_tokens = state["n_tokens"]
