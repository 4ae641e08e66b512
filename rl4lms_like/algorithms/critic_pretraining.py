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
        n_rollouts = len(self.explained)
        patience = self.settings.patience
        if n_rollouts >= self.settings.max_rollouts:
            return True
        if n_rollouts <= patience:
            return False

        # A rollout whose returns are all equal has no explained variance (NaN): it neither counts as a gain, nor as
        # what later rollouts must exceed.
        explained = []
        for value in self.explained:
            explained.append(-math.inf if math.isnan(value) else value)
        best_before = max(explained[: n_rollouts - patience])
        return max(explained[n_rollouts - patience :]) < best_before + self.settings.min_gain

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
            # lambda = 1: the targets are Monte-Carlo returns. With a smaller one they would depend on the values of a
            # critic that has learned nothing yet. The seed depends only on the number of the rollout, so that a resumed
            # run shuffles the remaining ones in the same way.
            buffer = EpisodeBuffer(device=algorithm.device, gamma=options.gamma, gae_lambda=1.0)
            buffer.seed(derived_seed(algorithm.sampling_seed, "critic pretraining", len(self.explained)))
            algorithm.policy.set_training_mode(False)
            with interruption.at_any_moment():  # nothing is lost: a resumed run generates this rollout again
                algorithm.collector.collect(buffer, n_tokens, updates_policy=False)

            # Weights change: the run cannot be resumed before the end of the passes.
            with interruption.finishing("this update of the critic"), blame_memory_errors_on("update"):
                algorithm.update_progress = UpdateProgress()
                self._train(algorithm, buffer)
                algorithm.update_progress = None

            # The buffer has the values of before the passes, so this measures the critic on returns it has not seen.
            values = torch.as_tensor(buffer.values)  # [n_tokens]
            returns = torch.as_tensor(buffer.returns)
            self.explained.append(explained_variance(values, returns))
            self.n_tokens += buffer.n_tokens
            yield self.explained[-1]

    def progress(self, explained: float) -> str:
        """Return a line that describes the last rollout."""
        n_rollouts = len(self.explained)
        return (
            f"critic, rollout {n_rollouts} of at most {self.settings.max_rollouts}: explained variance {explained:.3f}"
        )

    def _train(self, algorithm: OnPolicyTextAlgorithm, buffer: EpisodeBuffer) -> None:
        """Make the passes of the critic over a rollout."""
        algorithm.policy.set_training_mode(True)

        # By default the critic's rate at the start of the training. It is set for all groups, but without a gradient
        # the optimizer leaves out the policy's parameters.
        rate = self.settings.learning_rate
        if rate is None:
            rate = algorithm.lr_schedule(1.0) * algorithm.critic_factor
        for group in algorithm.policy.optimizer.param_groups:
            group["lr"] = rate

        n_steps = 0
        for _ in range(self.settings.n_epochs):
            for minibatch in buffer.get(algorithm.batch_size):
                algorithm.critic_step(minibatch)
                n_steps += 1
        algorithm.policy.optimizer.zero_grad()
        algorithm.guard.end_update(n_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the pretraining, in JSON's types."""
        # JSON has no NaN, the explained variance of returns that are all equal.
        explained: list[float | None] = []
        for value in self.explained:
            explained.append(None if math.isnan(value) else value)
        return {"explained": explained, "n_tokens": self.n_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.explained = []
        for value in state["explained"]:
            self.explained.append(math.nan if value is None else value)
        self.n_tokens = state["n_tokens"]
