"""What a run scores with: reward, metrics, post-processor, built before any data or weights are read.

Constructors look for their packages, word lists and programs. What several of them lack is said at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl4lms_like.core.errors import ComponentError, ConfigError, Mistake, NotReadyError, RL4LMsLikeError
from rl4lms_like.data_pools import DATA_POOLS
from rl4lms_like.data_pools.base import TextGenPool
from rl4lms_like.metrics import METRICS
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.metrics.named import NamedMetric
from rl4lms_like.post_processors import POST_PROCESSORS
from rl4lms_like.post_processors.call import try_post_processor
from rl4lms_like.rewards import REWARDS
from rl4lms_like.training.config.building import build_component
from rl4lms_like.training.config.places import POST_PROCESSING
from rl4lms_like.training.config.run_config import AnyConfig, ComponentConfig, MetricConfig, RunConfig

REWARD, POOL, METRIC = "reward_fn", "datapool", "train_evaluation.metrics"


@dataclass(frozen=True)
class Components:
    """The scores of a run.

    Args:
        reward_fn: of an RL run; None of a supervised one, and where it is not asked for.
        metrics: computed at each evaluation.
        post_processor: what a supervised run does to each response before it is scored; None: nothing.
    """

    reward_fn: Any
    metrics: list[BaseMetric]
    post_processor: Callable[[str], str] | None


def build_components(config: AnyConfig, *, with_reward: bool = True) -> Components:
    """All of them, or everything that stands in the way.

    Args:
        config: of the run.
        with_reward: an evaluation needs none.

    Raises:
        ConfigError: a constructor refused its arguments.
        NotReadyError: several could not be built.
        RL4LMsLikeError: one could not.
    """
    built, errors = {}, {}
    for path, build in _builders(config):
        if path == REWARD and not with_reward:
            continue
        try:
            built[path] = build()
        except RL4LMsLikeError as error:
            errors[path] = error
    if any(_is_mistake(error) for error in errors.values()):
        raise ConfigError([Mistake(_args_of(path, error), str(error)) for path, error in errors.items()])
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise NotReadyError(errors)
    metrics = [component for path, component in built.items() if path.startswith(f"{METRIC}.")]
    return Components(built.get(REWARD), metrics, built[POST_PROCESSING])


def _is_mistake(error: RL4LMsLikeError) -> bool:
    """Whether it is what the config says of a component: constructors refuse a value by `ValueError`."""
    return isinstance(error, ComponentError) and isinstance(error.__cause__, ValueError)


def _args_of(path: str, error: RL4LMsLikeError) -> str:
    return f"{path}.args" if _is_mistake(error) else path


def build_post_processor(config: AnyConfig) -> Callable[[str], str] | None:
    """The function that `post_processing_fn` names, tried on one text; None where it names none.

    Raises:
        RL4LMsLikeError: it failed, or lacks what it needs.
    """
    block = None if isinstance(config, RunConfig) else config.alg.generation_kwargs.get("post_processing_fn")
    if block is None:
        return None
    function: Callable[[str], str] = POST_PROCESSORS.get(block["id"], block.get("args"))
    try_post_processor(function)
    return function


def _require_pool(config: ComponentConfig) -> None:
    """A pool is prepared later, split by split; what it lacks is known before."""
    pool = DATA_POOLS.resolve(config.id)
    if isinstance(pool, type) and issubclass(pool, TextGenPool):
        pool.require(f"the data pool {config.id!r}", **config.args)


def _build_metric(config: MetricConfig) -> BaseMetric:
    metric: BaseMetric = build_component(METRICS, config, "metric")
    return metric if config.name is None else NamedMetric(metric, config.name)


def _builders(config: AnyConfig) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Where each component stands in the config, and what builds it."""
    if isinstance(config, RunConfig):
        yield REWARD, partial(build_component, REWARDS, config.reward_fn, "reward")
    yield POOL, partial(_require_pool, config.datapool)
    metrics = config.train_evaluation.metrics
    for index, metric in enumerate(metrics):
        if metric not in metrics[:index]:  # RL4LMs' files list some twice
            yield f"{METRIC}.{index}", partial(_build_metric, metric)
    yield POST_PROCESSING, partial(build_post_processor, config)
