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
    from rl4lms_like.algorithms import ALGORITHMS, OBJECTIVES
    from rl4lms_like.algorithms.a2c import A2C
    from rl4lms_like.algorithms.arguments import OnPolicyArguments
    from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
    from rl4lms_like.algorithms.nlpo import NLPO
    from rl4lms_like.algorithms.policy_gradient import (
        CISPO,
        CPGD,
        DAPO,
        GMPO,
        GRPO,
        GSPO,
        OPD,
        OPO,
        RLOO,
        DrGRPO,
        GroupPolicyGradient,
        MaxRL,
        OnlineDPO,
        ReinforcePP,
        ReinforcePPBaseline,
    )
    from rl4lms_like.algorithms.ppo import PPO
    from rl4lms_like.algorithms.sao import SAO
    from rl4lms_like.algorithms.trpo import TRPO
    from rl4lms_like.algorithms.vapo import VAPO
    from rl4lms_like.callbacks import CALLBACKS
    from rl4lms_like.callbacks.base import Callback, RunContext
    from rl4lms_like.config.load import load_config
    from rl4lms_like.core.episodes import EpisodeBatch
    from rl4lms_like.core.losses import policy_gradient
    from rl4lms_like.core.objective import Objective
    from rl4lms_like.core.observation import Observation
    from rl4lms_like.core.pictures import Picture
    from rl4lms_like.core.sample import Preference, Sample
    from rl4lms_like.data_pools import DATA_POOLS, SAMPLERS
    from rl4lms_like.data_pools.base import TextGenPool
    from rl4lms_like.data_pools.sampler import PromptSampler
    from rl4lms_like.engines import ENGINES
    from rl4lms_like.engines.base import GenerationEngine
    from rl4lms_like.envs import ENVIRONMENTS
    from rl4lms_like.envs.env import TextGenEnv
    from rl4lms_like.envs.tools import ToolEnv
    from rl4lms_like.envs.vec_env import TextVecEnv
    from rl4lms_like.inference import evaluate_run, generate_texts
    from rl4lms_like.metrics import METRICS
    from rl4lms_like.metrics.base import BaseMetric
    from rl4lms_like.offline.objective import TrainingObjective
    from rl4lms_like.offline.preference_objectives import DPO, IPO, KTO, ORPO, PreferenceObjective, RewardModel, SimPO
    from rl4lms_like.offline.trainer import SupervisedTrainer
    from rl4lms_like.on_policy.assemble import assemble
    from rl4lms_like.on_policy.trainer import OnPolicyTrainer
    from rl4lms_like.policies import POLICIES
    from rl4lms_like.policies.base import CausalLMActorCriticPolicy, Seq2SeqLMActorCriticPolicy
    from rl4lms_like.policies.masked import MaskableCausalLMActorCriticPolicy, MaskableSeq2SeqLMActorCriticPolicy
    from rl4lms_like.policies.vision import VisionLMActorCriticPolicy
    from rl4lms_like.post_processors import POST_PROCESSORS
    from rl4lms_like.python_api.python_run import Run, train
    from rl4lms_like.rewards import REWARDS
    from rl4lms_like.rewards.base import AnyReward, BatchedRewardFunction, RewardFunction, RewardPart
    from rl4lms_like.rewards.call import score_transition
    from rl4lms_like.rewards.combine import CombinedReward
    from rl4lms_like.rewards.python_function import PythonReward
    from rl4lms_like.rewards.sentiment import SentimentReward
    from rl4lms_like.rewards.synthetic import RewardIncreasingNumbers, RewardSentencesWithDates
    from rl4lms_like.rewards.text import LastTokenReward, TextReward
    from rl4lms_like.rollouts.kl import make_kl_controller
    from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
    from rl4lms_like.run import resume
    from rl4lms_like.system.errors import ConfigError, RL4LMsLikeError
    from rl4lms_like.system.import_paths import use_code_from
    from rl4lms_like.tracking.base import Tracker

_MODULES = {
    "A2C": "algorithms.a2c",
    "ALGORITHMS": "algorithms",
    "AnyReward": "rewards.base",
    "BaseMetric": "metrics.base",
    "BatchedRewardFunction": "rewards.base",
    "CALLBACKS": "callbacks",
    "CISPO": "algorithms.policy_gradient",
    "CPGD": "algorithms.policy_gradient",
    "Callback": "callbacks.base",
    "CausalLMActorCriticPolicy": "policies.base",
    "CombinedReward": "rewards.combine",
    "ConfigError": "system.errors",
    "DAPO": "algorithms.policy_gradient",
    "DATA_POOLS": "data_pools",
    "DPO": "offline.preference_objectives",
    "DrGRPO": "algorithms.policy_gradient",
    "ENGINES": "engines",
    "ENVIRONMENTS": "envs",
    "EpisodeBatch": "core.episodes",
    "GMPO": "algorithms.policy_gradient",
    "GRPO": "algorithms.policy_gradient",
    "GSPO": "algorithms.policy_gradient",
    "GenerationEngine": "engines.base",
    "GroupPolicyGradient": "algorithms.policy_gradient",
    "IPO": "offline.preference_objectives",
    "KTO": "offline.preference_objectives",
    "LastTokenReward": "rewards.text",
    "METRICS": "metrics",
    "MaskableCausalLMActorCriticPolicy": "policies.masked",
    "MaskableSeq2SeqLMActorCriticPolicy": "policies.masked",
    "MaxRL": "algorithms.policy_gradient",
    "NLPO": "algorithms.nlpo",
    "OBJECTIVES": "algorithms",
    "OPD": "algorithms.policy_gradient",
    "OPO": "algorithms.policy_gradient",
    "ORPO": "offline.preference_objectives",
    "Objective": "core.objective",
    "Observation": "core.observation",
    "OnPolicyArguments": "algorithms.arguments",
    "OnPolicyTextAlgorithm": "algorithms.base",
    "OnPolicyTrainer": "on_policy.trainer",
    "OnlineDPO": "algorithms.policy_gradient",
    "POLICIES": "policies",
    "POST_PROCESSORS": "post_processors",
    "PPO": "algorithms.ppo",
    "Picture": "core.pictures",
    "Preference": "core.sample",
    "PreferenceObjective": "offline.preference_objectives",
    "PromptSampler": "data_pools.sampler",
    "PythonReward": "rewards.python_function",
    "REWARDS": "rewards",
    "RL4LMsLikeError": "system.errors",
    "RLOO": "algorithms.policy_gradient",
    "ReinforcePP": "algorithms.policy_gradient",
    "ReinforcePPBaseline": "algorithms.policy_gradient",
    "RewardFunction": "rewards.base",
    "RewardIncreasingNumbers": "rewards.synthetic",
    "RewardModel": "offline.preference_objectives",
    "RewardPart": "rewards.base",
    "RewardSentencesWithDates": "rewards.synthetic",
    "Run": "python_api.python_run",
    "RunContext": "callbacks.base",
    "SAMPLERS": "data_pools",
    "SAO": "algorithms.sao",
    "Sample": "core.sample",
    "SentimentReward": "rewards.sentiment",
    "Seq2SeqLMActorCriticPolicy": "policies.base",
    "SimPO": "offline.preference_objectives",
    "SupervisedTrainer": "offline.trainer",
    "TRPO": "algorithms.trpo",
    "TextGenEnv": "envs.env",
    "TextGenPool": "data_pools.base",
    "TextReward": "rewards.text",
    "TextVecEnv": "envs.vec_env",
    "ToolEnv": "envs.tools",
    "Tracker": "tracking.base",
    "TrainingObjective": "offline.objective",
    "VAPO": "algorithms.vapo",
    "VisionLMActorCriticPolicy": "policies.vision",
    "assemble": "on_policy.assemble",
    "evaluate_run": "inference",
    "generate_texts": "inference",
    "load_config": "config.load",
    "make_kl_controller": "rollouts.kl",
    "policy_gradient": "core.losses",
    "resume": "run",
    "score_transition": "rewards.call",
    "train": "python_api.python_run",
    "use_code_from": "system.import_paths",
    "with_text_rollouts": "rollouts.text_rollouts",
}
"""Public name -> module that defines it, below this package."""

__all__ = [
    "A2C",
    "ALGORITHMS",
    "AnyReward",
    "BaseMetric",
    "BatchedRewardFunction",
    "CALLBACKS",
    "CISPO",
    "CPGD",
    "Callback",
    "CausalLMActorCriticPolicy",
    "CombinedReward",
    "ConfigError",
    "DAPO",
    "DATA_POOLS",
    "DPO",
    "DrGRPO",
    "ENGINES",
    "ENVIRONMENTS",
    "EpisodeBatch",
    "GMPO",
    "GRPO",
    "GSPO",
    "GenerationEngine",
    "GroupPolicyGradient",
    "IPO",
    "KTO",
    "LastTokenReward",
    "METRICS",
    "MaskableCausalLMActorCriticPolicy",
    "MaskableSeq2SeqLMActorCriticPolicy",
    "MaxRL",
    "NLPO",
    "OBJECTIVES",
    "OPD",
    "OPO",
    "ORPO",
    "Objective",
    "Observation",
    "OnPolicyArguments",
    "OnPolicyTextAlgorithm",
    "OnPolicyTrainer",
    "OnlineDPO",
    "POLICIES",
    "POST_PROCESSORS",
    "PPO",
    "Picture",
    "Preference",
    "PreferenceObjective",
    "PromptSampler",
    "PythonReward",
    "REWARDS",
    "RL4LMsLikeError",
    "RLOO",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "RewardFunction",
    "RewardIncreasingNumbers",
    "RewardModel",
    "RewardPart",
    "RewardSentencesWithDates",
    "Run",
    "RunContext",
    "SAMPLERS",
    "SAO",
    "Sample",
    "SentimentReward",
    "Seq2SeqLMActorCriticPolicy",
    "SimPO",
    "SupervisedTrainer",
    "TRPO",
    "TextGenEnv",
    "TextGenPool",
    "TextReward",
    "TextVecEnv",
    "ToolEnv",
    "Tracker",
    "TrainingObjective",
    "VAPO",
    "VisionLMActorCriticPolicy",
    "assemble",
    "evaluate_run",
    "generate_texts",
    "load_config",
    "make_kl_controller",
    "policy_gradient",
    "resume",
    "score_transition",
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
