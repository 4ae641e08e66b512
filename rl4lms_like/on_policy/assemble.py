"""Build the objects of a run from its config. Components receive their arguments here and never read the config.

RunConfig ─ reward, metrics ─ tokenizer ─ samples ─ environment ─ policy inside algorithm ─> Run
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.config.notices import learning_rate_notice
from rl4lms_like.config.run_config import AnyConfig, ComponentConfig, RunConfig, TokenizerConfig
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
from rl4lms_like.core.chat_template import ChatTemplate, chat_template_issue
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.stop_strings import stop_strings_of
from rl4lms_like.data_pools import DATA_POOLS, SAMPLERS
from rl4lms_like.envs.stepping import make_vec_env
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.policies import POLICIES, loading
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.loading import load_tokenizer
from rl4lms_like.rollouts.kl import make_kl_controller
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.small_models.embedded import with_embedded_models
from rl4lms_like.system.disk import saving, with_home
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, RL4LMsLikeError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.wording import excerpt, raised
from rl4lms_like.training.components import build_components, check_references

logger = logging.getLogger(__name__)

SMALL_MODEL = 20_000_000
"""Largest number of parameters of actor and critic for which `n_threads: auto` uses one thread; a second thread made
tiny models up to 40 times slower."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Run:
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

    def save_model(self, folder: Path) -> Path:
        """Write the language model and the tokenizer, ready for `from_pretrained`.

        Raises:
            RL4LMsLikeError: the folder cannot be written.
        """
        with saving(f"the model to {folder}"):
            return Path(self.policy.save_model(folder, self.tokenizer))


def assemble(config: RunConfig, ranks: Ranks | None = None) -> Run:
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
        config = with_embedded_models(config)

    # Users' components may draw from the global generators, in each process its own numbers. The library's own
    # components have generators of their own.
    set_random_seed(derived_seed(config.seed, "rank", ranks.rank) if ranks.rank else config.seed)
    components = build_components(config)

    # Only the models' configs are read so far: what does not fit is found before weights are loaded.
    networks = load_networks(config, load_model_config)
    model_config = networks["model_name"]
    tokenizer = build_tokenizer(config.tokenizer)
    check_fit(config, tokenizer, networks)
    max_prompt_length, _ = check_lengths(config, tokenizer, networks)
    check_weights(config, networks)

    pools = render_prompts(build_datapools(config.datapool), config.tokenizer, tokenizer)
    samples = {split: [sample for sample, _ in pool] for split, pool in pools.items()}
    check_references(config, components, samples)
    check_prompts(samples, tokenizer, model_config)

    with blame_memory_errors_on("generation"):
        env = build_env(config, tokenizer, components.reward_fn, pools["train"], model_config, ranks)
    with blame_memory_errors_on("loading"):
        algorithm = build_alg(config, env, ranks)

    # What depends on the size of the model.
    if notice := learning_rate_notice(config.to_dict(), algorithm.policy.n_parameters):
        logger.warning("%s", notice)
    set_n_threads(config, algorithm.policy)
    return Run(config, tokenizer, samples, components.metrics, env, algorithm, max_prompt_length, ranks)


def build_tokenizer(config: TokenizerConfig, *, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a config's `tokenizer` block.

    Raises:
        ConfigError: it has no chat template, although the config uses one, or the template's file cannot be read.
        ModelError: it cannot be loaded.
    """
    tokenizer = load_tokenizer(
        config.model_name,
        pad_token_as_eos_token=config.pad_token_as_eos_token,
        padding_side=config.padding_side,
        truncation_side=config.truncation_side,
        trust_remote_code=config.trust_remote_code,
        local_files_only=local_files_only,
    )

    # A text is the path of a template; True stands for the tokenizer's own.
    if isinstance(config.chat_template, str):
        try:
            tokenizer.chat_template = with_home(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise chat_template_issue(f"cannot read {config.chat_template!r}: {error}") from error
    if config.chat_template and not getattr(tokenizer, "chat_template", None):
        message = f"the tokenizer of {config.model_name!r} has no chat template; give the path of a Jinja file"
        raise chat_template_issue(message)
    return tokenizer


def chat_template_of(config: TokenizerConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """Return the chat template of a config's `tokenizer` block; None if prompts are plain texts."""
    return ChatTemplate(tokenizer, config.system_prompt) if config.chat_template else None


def render_prompts(
    pools: Mapping[str, Iterable[tuple[Sample, float]]], config: TokenizerConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return pools, split -> pairs of sample and weight, in which the chat template has rendered the prompts.

    Raises:
        ConfigError: prompts are messages and the config has no chat template, or the template does not accept them.
        DataPoolError: messages end with one of the assistant.
    """
    template = chat_template_of(config, tokenizer)
    if template is not None:
        return {
            split: [(template.with_rendered_prompt(sample), weight) for sample, weight in pool]
            for split, pool in pools.items()
        }
    for split, pool in pools.items():
        for sample, _ in pool:
            if sample.messages is not None:
                message = f"the prompts of the data pool are messages ({sample.id!r} of {split!r}): set it to true"
                raise chat_template_issue(message)
    return dict(pools)


def build_datapools(config: ComponentConfig) -> dict[str, Any]:
    """Return all splits of a config's `datapool` block.

    Raises:
        DataPoolError: a split could not be prepared or has entries that are not samples, or `train` is empty.
    """
    pools = {split: build_datapool(config, split) for split in SPLITS}
    if not len(pools["train"]):
        raise DataPoolError(f"data pool {config.id!r}: the split 'train' has no samples")
    return pools


def build_datapool(config: ComponentConfig, split: str) -> Any:
    """Return one split of a config's `datapool` block.

    Raises:
        DataPoolError: the split could not be prepared or has entries that are not samples.
    """
    of_split = f"the split {split!r} of the data pool {config.id!r}"
    try:
        pool = DATA_POOLS.get(config.id, {"split": split, **config.args})
        wrong = next((entry for entry in pool if not _is_entry(entry)), None)
    except DataPoolError as error:
        raise DataPoolError(f"{of_split}: {error}") from error
    except (RL4LMsLikeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise DataPoolError(f"{of_split} could not be prepared: {raised(error)}") from error
    if wrong is not None:
        message = "expected pairs (Sample, weight), where the prompt is a text and the references are a list"
        raise DataPoolError(f"{of_split} has {excerpt(wrong)}; {message}")
    return pool


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 2:
        return False
    prompt, references = (getattr(entry[0], name, None) for name in ("prompt_or_input_text", "references"))
    return isinstance(prompt, str) and isinstance(references, list | tuple)


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


def load_model_config(arguments: PolicyArguments, *, local_files_only: bool = False) -> PretrainedConfig:
    """Return the config of the policy's model.

    Raises:
        ModelError: no model has that name.
    """
    return loading.load_model_config(
        arguments.model_name, trust_remote_code=arguments.trust_remote_code, local_files_only=local_files_only
    )


def n_parameters(policy: Any) -> int:
    """Return the number of parameters of actor and critic, including frozen ones but not the reference model."""
    named = policy.named_parameters()
    return sum(parameter.numel() for name, parameter in named if not name.startswith("ref_model."))


def set_n_threads(config: AnyConfig, model: Any = None) -> None:
    """Set torch's number of threads; with `auto`, use one for a small model."""
    if config.n_threads != "auto":
        torch.set_num_threads(int(config.n_threads))
    elif model is not None and n_parameters(model) <= SMALL_MODEL:
        torch.set_num_threads(1)


def load_generation_config(model_name: str) -> GenerationConfig | None:
    """Return the generation config of a checkpoint, or of an adapter's base model; None if there is none."""
    try:
        return GenerationConfig.from_pretrained(loading.whole_checkpoint(model_name))
    except OSError:
        return None


def end_tokens(
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
    generation_config: GenerationConfig | None,
    template: ChatTemplate | None = None,
) -> list[int]:
    """Return the ids of the tokens that end a response.

    This is the tokenizer's end-of-text token, or all end tokens of the model if the tokenizer's is one of several.
    Chat models end a turn with a special token, which often is only in their generation config. With a chat template
    it is also the token that the template writes after a message of the assistant.
    """
    end_token_ids = _model_end_tokens(tokenizer, model_config, generation_config)
    end_of_turn = None if template is None else template.end_of_turn
    if end_of_turn is None or end_of_turn in end_token_ids:
        return end_token_ids
    return [*end_token_ids, end_of_turn]


def _model_end_tokens(
    tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig, generation_config: GenerationConfig | None
) -> list[int]:
    """Return the tokenizer's end-of-text token, or all end tokens of the model if the tokenizer's is one of several."""
    model_token: Any = None
    for config in (generation_config, model_config.get_text_config()):
        model_token = getattr(config, "eos_token_id", None)
        if isinstance(model_token, list | tuple) and tokenizer.eos_token_id in model_token:
            return list(model_token)

    # Without one of the tokenizer, those of the model's own config count.
    if tokenizer.eos_token_id is not None:
        return [tokenizer.eos_token_id]
    if isinstance(model_token, list | tuple):
        return list(model_token)
    return [] if model_token is None else [int(model_token)]
