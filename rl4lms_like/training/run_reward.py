"""The run's own reward in evaluations: which runs report it, and how the responses of an evaluation are scored.

generated responses ─ batches of `n_envs` ─ the environment's workers and time limit ─> reward of each response

Within one evaluation every response is scored once, whatever reads the results. Afterwards the state of the reward and
the global random generators are what they were before: an evaluation does not change the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rl4lms_like.config.rules import reads_run_reward, unknown_metric
from rl4lms_like.config.run_config import AnyConfig, RunConfig
from rl4lms_like.core.generated import Generated
from rl4lms_like.core.observation import Observation, TextLayout
from rl4lms_like.envs.dialogue_vec_env import ENVIRONMENT, REWARD_FN
from rl4lms_like.envs.scoring import EpisodeScorer
from rl4lms_like.metrics.base import BaseMetric, NamedMetric
from rl4lms_like.metrics.run_reward import PART, EpisodeRewards, RewardMetric
from rl4lms_like.rewards.base import inner_rewards
from rl4lms_like.rewards.call import leaves
from rl4lms_like.rewards.environment import EnvironmentReward
from rl4lms_like.system.errors import ConfigError
from rl4lms_like.training.resuming.states import load_random, random_state


class RunReward:
    """The reward of a run for the responses of evaluations.

    Args:
        scorer: computes the rewards.
        layout: shapes and tokenizer of the observations that rewards read.
        batch_size: number of responses that are scored together, as in rollouts.
    """

    def __init__(self, scorer: EpisodeScorer, layout: TextLayout, batch_size: int) -> None:
        self._scorer = scorer
        self._layout = layout
        self._batch_size = batch_size
        self._last: tuple[Sequence[Generated], EpisodeRewards] | None = None

    def rewards_of(self, generated: Sequence[Generated]) -> EpisodeRewards:
        """Return the rewards of responses with token ids; those of the last call are not computed again.

        Raises:
            RewardError: the reward failed.
        """
        if self._last is not None and self._last[0] is generated:
            return self._last[1]

        totals: list[float] = []
        values_by_part: dict[str, list[float]] = {}
        with _unchanged_random_state():
            for start in range(0, len(generated), self._batch_size):
                batch = [self._final_state(item) for item in generated[start : start + self._batch_size]]
                rewards = self._scorer.score(batch, keeps_state=True)

                # From the tokens `[n_tokens]` to the episodes `[n]`; a part is NaN where it left an episode out.
                lengths = [state.n_actions for state in batch]
                totals += _episode_sums(rewards.total, lengths)
                for name, values in rewards.parts.items():
                    values_by_part.setdefault(name, []).extend(_episode_sums(values, lengths))

        of_environment = [item.environment_reward for item in generated if item.environment_reward is not None]
        if of_environment:
            is_only = isinstance(self._scorer.reward_fn, EnvironmentReward)
            values_by_part = {} if is_only else {ENVIRONMENT: of_environment, **(values_by_part or {REWARD_FN: totals})}
            totals = [total + reward for total, reward in zip(totals, of_environment, strict=True)]
        results = EpisodeRewards(totals, values_by_part)
        self._last = (generated, results)
        return results

    def _final_state(self, item: Generated) -> Observation:
        assert item.prompt_ids is not None
        assert item.response_ids is not None
        n_actions = len(item.response_ids)
        return Observation(item.sample, item.prompt_ids, item.response_ids, n_actions=n_actions, layout=self._layout)


def _episode_sums(values: np.ndarray, lengths: Sequence[int]) -> list[float]:
    starts = np.cumsum([0, *lengths[:-1]])
    sums: list[float] = np.add.reduceat(values.astype(np.float64), starts).tolist()
    return sums


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Restore the global random generators afterwards; rewards of users may draw from them."""
    tensors, numbers = random_state()
    try:
        yield
    finally:
        load_random(numbers, {name.removeprefix("random."): tensor for name, tensor in tensors.items()})


def is_local(reward: Any) -> bool:
    """Return whether a reward, and every reward that it is made of, neither calls a server nor a paid service."""
    return all(getattr(inner, "is_local", True) for inner in inner_rewards(reward))


def with_run_reward(config: AnyConfig, metrics: Sequence[BaseMetric], reward: Any) -> list[BaseMetric]:
    """Return the metrics of a run, with that of its own reward where an RL run reports it without being told to.

    It does if the config names no metric and the reward is local, or if the config selects one of its keys.

    Raises:
        ConfigError: the config selects a part that the reward does not have.
    """
    if not isinstance(config, RunConfig):
        return list(metrics)
    _check_parts(config, reward)
    has_own = any(map(is_run_reward, metrics))
    is_default = not config.train_evaluation.metrics and is_local(reward)
    if not has_own and (is_default or reads_run_reward(config)):
        return [*metrics, RewardMetric()]
    return list(metrics)


def reports_run_reward(config: AnyConfig) -> bool:
    """Return whether evaluations of a run report its own reward, if that is local or listed among the metrics."""
    if not isinstance(config, RunConfig):
        return False
    metrics = config.train_evaluation.metrics
    return not metrics or any(metric.id == "reward" for metric in metrics) or reads_run_reward(config)


def is_run_reward(metric: BaseMetric) -> bool:
    """Return whether a metric is the run's own reward, perhaps under another name."""
    return isinstance(metric.metric if isinstance(metric, NamedMetric) else metric, RewardMetric)


def connect(metrics: Sequence[BaseMetric], run_reward: RunReward) -> None:
    """Let all metrics of the run's own reward read the same results."""
    for metric in metrics:
        inner = metric.metric if isinstance(metric, NamedMetric) else metric
        if isinstance(inner, RewardMetric):
            inner.rewards_of = run_reward.rewards_of


def _check_parts(config: RunConfig, reward: Any) -> None:
    """Raise a `ConfigError` if `keep_best` or the doctor reads a part of the reward that there is not."""
    evaluation = config.train_evaluation
    selected = {}
    if evaluation.keep_best is not None:
        selected["train_evaluation.keep_best.metric"] = evaluation.keep_best.metric
    for index, held_out in enumerate(config.doctor.held_out):
        selected[f"doctor.held_out.{index}.metric"] = held_out.metric

    parts = [leaf.name for leaf in leaves(reward) if leaf.name]
    if config.env.dialogue is not None and not isinstance(reward, EnvironmentReward):
        parts = [ENVIRONMENT, *(parts or [REWARD_FN])]
    known = [PART.format(name) for name in parts]
    names = [f"/{metric.name}" for metric in evaluation.metrics if metric.id == "reward" and metric.name]
    keys = [*known, *(key + name for key in known for name in names)]
    issues = []
    for path, key in selected.items():
        if key.startswith(PART.format("")) and key not in keys:
            issues.append(unknown_metric(path, key, keys or ["reward/mean"]))
    if issues:
        raise ConfigError(issues)
