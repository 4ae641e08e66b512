"""Build the objects of a run from its config. Components receive their arguments here and never read the config.

RunConfig ─ reward, metrics ─ tokenizer ─ samples ─ environment ─ policy inside algorithm ─> AssembledRun
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.config.added_tokens import with_created_models
from rl4lms_like.config.binding import ComponentConfig
from rl4lms_like.config.rules import learning_rate_notice
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.config.settings import (
    check_fit,
    check_lengths,
    check_prompts,
    check_ranks,
    check_settings,
    check_weights,
    load_networks,
    response_length,
)
from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.stop_strings import stop_strings_of
from rl4lms_like.data_pools import SAMPLERS
from rl4lms_like.envs.scoring import EpisodeScorer
from rl4lms_like.envs.stepping import make_vec_env
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.policies import POLICIES
from rl4lms_like.rollouts.kl import make_kl_controller
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.system.disk import saving
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, RL4LMsLikeError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.wording import raised
from rl4lms_like.training.components import build_components, check_samples
from rl4lms_like.training.inputs import (
    build_datapools,
    build_tokenizer,
    chat_template_of,
    end_tokens,
    load_generation_config,
    load_model_config,
    render_prompts,
    stripped_pattern_notices,
)
from rl4lms_like.training.run_reward import RunReward, connect
from rl4lms_like.training.threads import set_n_threads

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AssembledRun:
    """Objects that a trainer needs.

    Args:
        config: the run's config, with a folder in place of each embedded model.
        tokenizer: encodes prompts and decodes responses.
        samples: by split, `train`, `val` and `test`.
        metrics: computed at each evaluation.
        env: environment of the rollouts.
        algorithm: contains the policy.
        max_prompt_length: tokens; longer prompts are truncated.
        ranks: the processes that train together.
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    samples: Mapping[str, list[Sample]]
    metrics: list[BaseMetric]
    env: VecEnv
    algorithm: OnPolicyTextAlgorithm
    max_prompt_length: int
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def policy(self) -> Any:
        """The policy that is trained."""
        return self.algorithm.policy

    @property
    def continuations(self) -> Continuations:
        """Texts of responses, as rewards read them."""
        continuations: Continuations = self.env.get_attr("layout", [0])[0].continuations
        return continuations

    def save_model(self, folder: Path) -> Path:
        """Write the language model and the tokenizer, ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        end_tokens_of_responses = self.env.get_attr("eos_token_ids", [0])[0]
        with saving(f"the model to {folder}"):
            return Path(self.policy.save_model(folder, self.tokenizer, eos_token_ids=end_tokens_of_responses))


def assemble(config: RunConfig, ranks: Ranks | None = None) -> AssembledRun:
    """Build the objects of a run, in each of the processes that train together; default: this one alone.

    Raises:
        ConfigError: settings of the config are incompatible with each other.
        DataPoolError: a data pool could not be prepared, or has no training samples.
        ModelError: a model or tokenizer cannot be loaded, or they are incompatible.
        ComponentError: a reward or metric could not be built; see `build_components` for its other errors.
    """
    set_n_threads(config)
    ranks = ranks or Ranks()
    check_settings(config)
    check_ranks(config, ranks.size)
    with ranks.main_first():
        config = with_created_models(config)

    # Users' components may draw from the global generators, in each process its own numbers. The library's own
    # components have generators of their own.
    set_random_seed(derived_seed(config.seed, "rank", ranks.rank) if ranks.rank else config.seed)
    components = build_components(config)

    # Only the models' configs are read so far: what does not fit is found before weights are loaded.
    networks = load_networks(config, load_model_config)
    model_config = networks["model_name"]
    tokenizer = build_tokenizer(config.tokenizer)
    check_fit(config, tokenizer, networks)
    for pattern_notice in stripped_pattern_notices(config, tokenizer):
        logger.warning("%s", pattern_notice)
    max_prompt_length, _ = check_lengths(config, tokenizer, networks)
    check_weights(config, networks)

    pools = render_prompts(build_datapools(config.datapool), config.tokenizer, tokenizer)
    samples = {split: [sample for sample, _ in pool] for split, pool in pools.items()}
    check_samples(config, components, samples)
    check_prompts(samples, tokenizer, model_config)

    with blame_memory_errors_on("generation"):
        env = build_env(
            config,
            tokenizer,
            reward_fn=components.reward_fn,
            samples=pools["train"],
            model_config=model_config,
            ranks=ranks,
        )
    connect(components.metrics, _run_reward(config, env, components.reward_fn))
    with blame_memory_errors_on("loading"):
        algorithm = build_alg(config, env, ranks)

    # What depends on the size of the model.
    if notice := learning_rate_notice(config, algorithm.policy.n_parameters):
        logger.warning("%s", notice)
    set_n_threads(config, algorithm.policy)
    return AssembledRun(
        config=config,
        tokenizer=tokenizer,
        samples=samples,
        metrics=components.metrics,
        env=env,
        algorithm=algorithm,
        max_prompt_length=max_prompt_length,
        ranks=ranks,
    )


def _run_reward(config: RunConfig, env: VecEnv, reward_fn: Any) -> RunReward:
    """Return the reward for evaluations, which uses the workers and the time limit of the environment."""
    (layout,) = env.get_attr("layout", [0])
    scorer = env.scorer if isinstance(env, TextVecEnv) else EpisodeScorer(reward_fn, layout)
    return RunReward(scorer, layout, batch_size=env.num_envs)


def build_env(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_fn: Any,
    samples: Any,
    model_config: PretrainedConfig,
    ranks: Ranks | None = None,
) -> VecEnv:
    """Return the vectorised environment of a config's `env` block.

    Episodes have at most `max_episode_length` tokens, or the rollouts' `max_new_tokens` if that is less. The
    rollouts' `stop_strings` end them.
    """
    arguments = dict(config.env.args)
    arguments["stop_strings"] = stop_strings_of(config.alg.policy.args.get("generation_kwargs"))
    arguments["max_episode_length"] = response_length(config, model_config)
    arguments["is_encoder_decoder"] = bool(model_config.is_encoder_decoder)
    if not model_config.is_encoder_decoder:
        arguments.pop("context_start_token", None)
    if config.datapool.sampler is not None:
        arguments["make_sampler"] = partial(build_sampler, config.datapool.sampler)

    # Stable-Baselines3's environments know neither workers of the reward nor other processes.
    if config.env.vec_env == "text":
        arguments["reward_workers"] = config.env.reward_workers
        arguments["reward_timeout"] = config.env.reward_timeout
        arguments["ranks"] = ranks

    # `n_envs` counts the environments of all processes, so that a rollout has the same size in any number of them.
    n_envs = config.env.n_envs if ranks is None else config.env.n_envs // ranks.size
    template = chat_template_of(config.tokenizer, tokenizer)
    generation_config = load_generation_config(config.alg.policy.args["model_name"])
    return make_vec_env(
        config.env.vec_env,
        n_envs,
        tokenizer=tokenizer,
        reward_function=reward_fn,
        samples=samples,
        vocab_size=int(model_config.get_text_config().vocab_size),
        eos_token_ids=end_tokens(tokenizer, model_config, generation_config, template),
        **arguments,
    )


def build_sampler(config: ComponentConfig, items: Any) -> Any:
    """Return the sampler of a config's `datapool.sampler` block.

    Raises:
        ConfigError: the sampler rejected its arguments.
        DataPoolError: it could not be built.
    """
    try:
        return SAMPLERS.get(config.id, {"items": items, **config.args})
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except ValueError as error:
        raise ConfigError([ConfigIssue("datapool.sampler.args", str(error))]) from error
    except BaseException as error:
        raise DataPoolError(f"the sampler {config.id!r} could not be built: {raised(error)}") from error


def build_alg(config: RunConfig, env: VecEnv, ranks: Ranks) -> Any:
    """Return the algorithm of a config's `alg` block with its policy loaded."""
    # null is passed on, but for seed and device it selects the run's value.
    arguments: dict[str, Any] = {"seed": config.seed, "device": config.device}
    for key, value in config.alg.args.items():
        if value is not None or key not in arguments:
            arguments[key] = value

    policy_kwargs = dict(config.alg.policy.args)
    if ranks.size > 1:
        arguments["ranks"] = ranks
        if config.distributed.strategy == "fsdp":
            policy_kwargs["sharded"] = True

    kl = asdict(config.alg.kl_div)
    norm_reward = kl.pop("norm_reward")
    algorithm = with_text_rollouts(ALGORITHMS.resolve(config.alg.id))
    return algorithm(
        POLICIES.resolve(config.alg.policy.id),
        env,
        policy_kwargs=policy_kwargs,
        kl_controller=make_kl_controller(kl.pop("coeff"), kl.pop("target_kl"), **kl),
        norm_reward=norm_reward,
        **arguments,
    )
