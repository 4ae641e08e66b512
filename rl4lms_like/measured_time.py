"""Measure how long an iteration takes: output of `check --time`.

    one generation batch and its update, twice ─ seconds of the second ─ times the batches of a rollout

The first one also allocates memory and compiles kernels. Models are loaded and the reward is called, as in training;
nothing is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stable_baselines3.common.logger import Logger

from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.on_policy.assemble import assemble
from rl4lms_like.system.errors import ConfigError, ConfigIssue


@dataclass(frozen=True)
class IterationTime:
    """Measured seconds of one generation batch, and the number of batches of a rollout.

    Args:
        rollout_s: to generate, reward and score the batch.
        update_s: of the update on it.
        tokens: response tokens of the batch.
        batches: generation batches per rollout, with responses of the measured mean length; at least, with dynamic
            sampling.
        n_iters: iterations of the run.
    """

    rollout_s: float
    update_s: float
    tokens: int
    batches: int
    n_iters: int

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration."""
        return self.batches * (self.rollout_s + self.update_s)

    def lines(self) -> list[tuple[str, str]]:
        """Return the name and the amount of each quantity, as `check` prints them."""
        phases = f"rollout {self.batches * self.rollout_s:.3g} s, update {self.batches * self.update_s:.3g} s"
        hours = self.n_iters * self.iteration_s / 3600
        total = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
        return [
            ("measured", f"one generation batch of {self.tokens:,} tokens and its update"),
            ("per iteration", f"about {self.iteration_s:.3g} s: {phases}"),
            ("in all", f"about {total} for {self.n_iters:,} iterations, without evaluations"),
        ]


def measure_iteration(config: RunConfig) -> IterationTime:
    """Measure a generation batch and its update with the run's own models, data and reward.

    Raises:
        ConfigError: the algorithm is one of Stable-Baselines3, which does not log the time of its updates.
        RL4LMsLikeError: the run cannot be built, or it fails.
    """
    run = assemble(config)
    algorithm = run.algorithm
    if not hasattr(algorithm, "arguments_class"):
        raise ConfigError([ConfigIssue("alg.id", "--time can measure only algorithms of this library")])
    algorithm.set_logger(Logger(folder=None, output_formats=[]))

    # One batch, whatever the rollout's size, and the update of an iteration that trains actor and critic.
    collector = algorithm.collector
    collector.options = replace(collector.options, n_episodes=None, dynamic_sampling=None)
    n_steps = algorithm.n_steps
    algorithm.n_steps = 1
    algorithm.pretraining = None
    algorithm.n_iterations = algorithm.arguments.critic_only_iterations
    for iteration in range(2):
        algorithm.learn_iteration(iteration, 2)
    run.env.close()

    # As many batches as a rollout needs with responses of this mean length.
    tokens = algorithm.rollout_buffer.n_tokens
    n_episodes = config.alg.args.get("n_episodes")
    batches = math.ceil(n_steps * config.env.n_envs / tokens) if n_episodes is None else n_episodes // config.env.n_envs
    seconds = algorithm.logger.name_to_value
    return IterationTime(
        rollout_s=seconds["time/rollout_s"],
        update_s=seconds["time/update_s"],
        tokens=tokens,
        batches=batches,
        n_iters=config.train_evaluation.n_iters,
    )
