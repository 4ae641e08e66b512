"""Fine-tune language models with reinforcement learning on any reward function.

    from rl4lms_like import Run

Names are imported on first use, so that `import rl4lms_like` loads neither torch nor transformers. The import registers
the environment `rl4lms_like/TextGen-v0` with Gymnasium.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rl4lms_like.envs import register_envs

# For type checkers and editors, which do not run `__getattr__`. A new public name is added here and in both tables.
if TYPE_CHECKING:
    from rl4lms_like.algorithms import ALGORITHMS
    from rl4lms_like.algorithms.a2c import A2C
    from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
    from rl4lms_like.algorithms.nlpo import NLPO
    from rl4lms_like.algorithms.ppo import PPO
    from rl4lms_like.algorithms.sao import SAO
    from rl4lms_like.algorithms.trpo import TRPO
    from rl4lms_like.algorithms.vapo import VAPO
    from rl4lms_like.config.run_config import load_config
    from rl4lms_like.core.observation import Observation
    from rl4lms_like.core.sample import Sample
    from rl4lms_like.data_pools import DATA_POOLS
    from rl4lms_like.data_pools.base import TextGenPool
    from rl4lms_like.envs.env import TextGenEnv
    from rl4lms_like.envs.vec_env import TextVecEnv
    from rl4lms_like.metrics import METRICS
    from rl4lms_like.metrics.base import BaseMetric
    from rl4lms_like.offline.trainer import SupervisedTrainer
    from rl4lms_like.on_policy.assemble import assemble
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer
    from rl4lms_like.policies import POLICIES
    from rl4lms_like.policies.base import CausalLMActorCriticPolicy, Seq2SeqLMActorCriticPolicy
    from rl4lms_like.policies.masked import MaskableCausalLMActorCriticPolicy, MaskableSeq2SeqLMActorCriticPolicy
    from rl4lms_like.python_api.python_run import Run, train
    from rl4lms_like.rewards import REWARDS
    from rl4lms_like.rewards.base import BatchedRewardFunction, RewardFunction
    from rl4lms_like.rollouts.kl import make_kl_controller
    from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
    from rl4lms_like.system.errors import ConfigError, RL4LMsLikeError
    from rl4lms_like.system.import_paths import use_code_from
    from rl4lms_like.tracking.base import Tracker

_MODULES = {
    "A2C": "algorithms.a2c",
    "ALGORITHMS": "algorithms",
    "BaseMetric": "metrics.base",
    "BatchedRewardFunction": "rewards.base",
    "CausalLMActorCriticPolicy": "policies.base",
    "ConfigError": "system.errors",
    "DATA_POOLS": "data_pools",
    "METRICS": "metrics",
    "MaskableCausalLMActorCriticPolicy": "policies.masked",
    "MaskableSeq2SeqLMActorCriticPolicy": "policies.masked",
    "NLPO": "algorithms.nlpo",
    "Observation": "core.observation",
    "OnPolicyTextAlgorithm": "algorithms.base",
    "OnPolicyTrainer": "on_policy.trainer",
    "POLICIES": "policies",
    "PPO": "algorithms.ppo",
    "REWARDS": "rewards",
    "RL4LMsLikeError": "system.errors",
    "RewardFunction": "rewards.base",
    "Run": "python_api.python_run",
    "SAO": "algorithms.sao",
    "Sample": "core.sample",
    "Seq2SeqLMActorCriticPolicy": "policies.base",
    "SupervisedTrainer": "offline.trainer",
    "TRPO": "algorithms.trpo",
    "TextGenEnv": "envs.env",
    "TextGenPool": "data_pools.base",
    "TextVecEnv": "envs.vec_env",
    "Tracker": "tracking.base",
    "VAPO": "algorithms.vapo",
    "assemble": "on_policy.assemble",
    "load_config": "config.run_config",
    "make_kl_controller": "rollouts.kl",
    "train": "python_api.python_run",
    "use_code_from": "system.import_paths",
    "with_text_rollouts": "rollouts.text_rollouts",
}
"""Public name -> module that defines it, below this package."""

__all__ = [
    "A2C",
    "ALGORITHMS",
    "BaseMetric",
    "BatchedRewardFunction",
    "CausalLMActorCriticPolicy",
    "ConfigError",
    "DATA_POOLS",
    "METRICS",
    "MaskableCausalLMActorCriticPolicy",
    "MaskableSeq2SeqLMActorCriticPolicy",
    "NLPO",
    "Observation",
    "OnPolicyTextAlgorithm",
    "OnPolicyTrainer",
    "POLICIES",
    "PPO",
    "REWARDS",
    "RL4LMsLikeError",
    "RewardFunction",
    "Run",
    "SAO",
    "Sample",
    "Seq2SeqLMActorCriticPolicy",
    "SupervisedTrainer",
    "TRPO",
    "TextGenEnv",
    "TextGenPool",
    "TextVecEnv",
    "Tracker",
    "VAPO",
    "assemble",
    "load_config",
    "make_kl_controller",
    "train",
    "use_code_from",
    "with_text_rollouts",
]

try:
    __version__ = version("rl4lms-like")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0"

register_envs()


def __getattr__(name: str) -> Any:
    # Python calls this for a name that the module does not have (PEP 562).
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
