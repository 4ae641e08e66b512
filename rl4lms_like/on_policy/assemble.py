"""Build the objects of a run from its config. Components receive their arguments here and never read the config.

RunConfig ─ reward, metrics ─ tokenizer ─ samples ─ environment ─ policy inside algorithm ─> AssembledRun
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.base import OnPolicyTextAlgorithm
from rl4lms_like.algorithms.pretraining_mix import PretrainingMix, Text
from rl4lms_like.callbacks.base import Callback
from rl4lms_like.config.added_tokens import with_created_models
from rl4lms_like.config.binding import ComponentConfig
from rl4lms_like.config.rules import learning_rate_notice
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.config.settings import (
    check_families,
    check_fit,
    check_lengths,
    check_prompts,
    check_ranks,
    check_settings,
    check_weights,
    load_networks,
    response_length,
    speedups_without_effect,
)
from rl4lms_like.core.continuation import Continuations
from rl4lms_like.core.observation import TextLayout
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.seeding import derived_seed
from rl4lms_like.core.stop_strings import stop_strings_of
from rl4lms_like.data_pools import SAMPLERS
from rl4lms_like.envs.dialogue_vec_env import DialogueVecEnv
from rl4lms_like.envs.scoring import EpisodeScorer
from rl4lms_like.envs.stepping import make_vec_env
from rl4lms_like.envs.vec_env import TextVecEnv
from rl4lms_like.metrics.base import BaseMetric
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.parity import longest_independent_of_batch
from rl4lms_like.rollouts.kl import make_kl_controller
from rl4lms_like.rollouts.text_rollouts import with_text_rollouts
from rl4lms_like.system.disk import saving
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, RL4LMsLikeError
from rl4lms_like.system.out_of_memory import blame_memory_errors_on
from rl4lms_like.system.ranks import Ranks
from rl4lms_like.system.wording import beginning, raised
from rl4lms_like.training.components import build_components, check_samples
from rl4lms_like.training.examples import NOT_LEARNED, ExampleEncoder
from rl4lms_like.training.inputs import (
    build_datapool,
    build_datapools,
    chat_template_of,
    dialogue_settings,
    end_tokens,
    load_generation_config,
    load_model_config,
    render_prompts,
    stripped_pattern_notices,
    token_limit,
    tokenizer_and_pictures,
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
        callbacks: of the user, in the order of the config.
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    samples: Mapping[str, list[Sample]]
    metrics: list[BaseMetric]
    env: VecEnv
    algorithm: OnPolicyTextAlgorithm
    max_prompt_length: int
    ranks: Ranks = field(default_factory=Ranks)
    callbacks: list[Callback] = field(default_factory=list)

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
    if config.alg.policy.reads_pictures:
        check_families(config, networks)  # before the processor of a wrong family is loaded
    tokenizer, pictures = tokenizer_and_pictures(config)
    check_fit(config, tokenizer, networks)
    for notice in (*stripped_pattern_notices(config, tokenizer), *speedups_without_effect(config, model_config)):
        logger.warning("%s", notice)
    max_prompt_length, _ = check_lengths(config, tokenizer, networks)
    check_weights(config, networks)

    pools = render_prompts(build_datapools(config.datapool), config.tokenizer, tokenizer)
    samples = {split: [sample for sample, _ in pool] for split, pool in pools.items()}
    check_samples(config, components, samples)
    if config.env.dialogue is None:  # otherwise the prompts are the first texts of the environment
        check_prompts(samples, tokenizer, model_config, pictures=pictures, max_prompt_length=max_prompt_length)

    ptx = build_ptx(config, tokenizer, model_config, pictures)

    with blame_memory_errors_on("generation"):
        env = build_env(
            config,
            tokenizer,
            reward_fn=components.reward_fn,
            samples=pools["train"],
            model_config=model_config,
            ranks=ranks,
            pictures=pictures,
        )
    connect(components.metrics, _run_reward(config, env, components.reward_fn))
    with blame_memory_errors_on("loading"):
        algorithm = build_alg(config, env, ranks, pictures)
    if ptx is not None:
        algorithm.ptx = ptx

    # What depends on the size of the model.
    rate_notice = learning_rate_notice(config, algorithm.policy.n_parameters)
    if rate_notice is not None:
        logger.warning("%s", rate_notice)
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
        callbacks=components.callbacks,
    )


def _run_reward(config: RunConfig, env: VecEnv, reward_fn: Any) -> RunReward:
    """Return the reward for evaluations, which uses the workers and the time limit of the environment."""
    (layout,) = env.get_attr("layout", [0])
    scorer = env.scorer if isinstance(env, TextVecEnv) else EpisodeScorer(reward_fn, layout)
    return RunReward(scorer, layout, batch_size=env.num_envs)


def build_ptx(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
    pictures: PictureEncoder | None = None,
) -> PretrainingMix | None:
    """Return the texts of a config's `alg.ptx` block; None without one, or if their loss has the coefficient 0.

    `pictures` encodes the prompts of a vision-language model.

    Raises:
        DataPoolError: the data pool could not be prepared, has nothing to learn, or has a text with a token that stands
            for an image.
    """
    ptx = config.alg.ptx
    if ptx is None or not ptx.coeff:
        return None

    # Within the positions of the model, and where log-probs do not depend on the batch.
    limits = [ptx.max_length, token_limit(tokenizer, model_config)]
    independent = longest_independent_of_batch(model_config)
    if independent is not None:
        limits.append(independent)
    max_length = min(limits)

    end_token_id = tokenizer.eos_token_id
    if end_token_id is None:
        template = chat_template_of(config.tokenizer, tokenizer)
        generation_config = load_generation_config(config.alg.policy.args["model_name"])
        end_token_id = next(iter(end_tokens(tokenizer, model_config, generation_config, template)), None)
    encoder = ExampleEncoder(
        tokenizer=tokenizer,
        is_encoder_decoder=bool(model_config.is_encoder_decoder),
        max_prompt_length=max_length,
        max_length=max_length,
        end_token_id=end_token_id,
    )

    pool = render_prompts({"train": build_datapool(ptx.data, "train")}, config.tokenizer, tokenizer)["train"]
    samples = [sample for sample, _ in pool]
    with_images = [sample.id for sample in samples if sample.images]
    if with_images:
        message = f"sample {with_images[0]!r} has images, which these texts cannot have; remove image_column"
        raise DataPoolError(f"data pool {ptx.data.id!r} (alg.ptx.data): {message}")
    examples = encoder.encode(samples)
    texts = []
    placeholders = set() if pictures is None else set(pictures.placeholder_ids)
    for row in examples.rows:
        # The policy's distribution excludes these tokens: their log-prob would be that of an impossible one.
        if not placeholders.isdisjoint(row["input_ids"]):
            text_with_mark = beginning(str(tokenizer.decode(row["input_ids"])))
            message = f"the text {text_with_mark} has a token that stands for an image; remove it from the text"
            raise DataPoolError(f"data pool {ptx.data.id!r} (alg.ptx.data): {message}")
        text = mixed_text(row["input_ids"], row["labels"], is_encoder_decoder=encoder.is_encoder_decoder)
        if text is not None:
            texts.append(text)
    if not texts:
        raise DataPoolError(f"data pool {ptx.data.id!r} (alg.ptx.data): the split 'train' has nothing to learn")
    for notice in examples.notices("alg.ptx.data"):
        logger.warning("%s", notice)
    return PretrainingMix(
        texts=texts,
        coeff=ptx.coeff,
        batch_size=ptx.batch_size,
        seed=config.seed,
        pad_token_id=TextLayout(tokenizer, 1, 1).pad_token_id,
    )


def mixed_text(ids: list[int], labels: list[int], *, is_encoder_decoder: bool) -> Text | None:
    """Return an example of supervised training as a text of `ptx`; None if none of its tokens is learned."""
    if is_encoder_decoder:
        return Text(prompt=ids, response=labels, is_learned=[True] * len(labels)) if labels else None

    # Up to the first learned token a text is a prompt; what follows the last one has no effect.
    learned = [position for position, label in enumerate(labels) if label != NOT_LEARNED]
    if not learned:
        return None
    start = learned[0]
    end = learned[-1] + 1
    is_learned = [label != NOT_LEARNED for label in labels[start:end]]
    return Text(prompt=ids[:start], response=ids[start:end], is_learned=is_learned)


def build_env(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_fn: Any,
    samples: Any,
    model_config: PretrainedConfig,
    ranks: Ranks | None = None,
    pictures: PictureEncoder | None = None,
) -> VecEnv:
    """Return the vectorised environment of a config's `env` block.

    Episodes have at most `max_episode_length` tokens, or the rollouts' `max_new_tokens` if that is less. The
    rollouts' `stop_strings` end them.

    `pictures` encodes the prompts of a vision-language model.
    """
    arguments = dict(config.env.args)
    arguments["stop_strings"] = stop_strings_of(config.alg.policy.args.get("generation_kwargs"))
    arguments["max_episode_length"] = response_length(config, model_config)
    arguments["is_encoder_decoder"] = bool(model_config.is_encoder_decoder)
    if not model_config.is_encoder_decoder:
        arguments.pop("context_start_token", None)
    if config.datapool.sampler is not None:
        arguments["make_sampler"] = partial(build_sampler, config.datapool.sampler)

    if pictures is not None:
        arguments["pictures"] = pictures

    # Stable-Baselines3's environments know neither workers of the reward nor other processes.
    if config.env.vec_env == "text":
        arguments["reward_workers"] = config.env.reward_workers
        arguments["reward_timeout"] = config.env.reward_timeout
        arguments["ranks"] = ranks

    # `n_envs` counts the environments of all processes, so that a rollout has the same size in any number of them.
    n_envs = config.env.n_envs if ranks is None else config.env.n_envs // ranks.size
    make: Callable[..., VecEnv] = partial(make_vec_env, config.env.vec_env)
    dialogue = dialogue_settings(config, tokenizer)
    if dialogue is not None:
        make = partial(DialogueVecEnv, settings=dialogue, env_seed=config.seed)
        del arguments["max_episode_length"]
    template = chat_template_of(config.tokenizer, tokenizer)
    generation_config = load_generation_config(config.alg.policy.args["model_name"])
    return make(
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


def build_alg(config: RunConfig, env: VecEnv, ranks: Ranks, pictures: PictureEncoder | None = None) -> Any:
    """Return the algorithm of a config's `alg` block with its policy loaded."""
    # null is passed on, but for seed and device it selects the run's value.
    arguments: dict[str, Any] = {"seed": config.seed, "device": config.device}
    for key, value in config.alg.args.items():
        if value is not None or key not in arguments:
            arguments[key] = value

    policy_kwargs = dict(config.alg.policy.args)
    if pictures is not None:
        policy_kwargs["pictures"] = pictures
    if ranks.size > 1:
        arguments["ranks"] = ranks
        if config.distributed.strategy == "fsdp":
            policy_kwargs["sharded"] = True
            policy_kwargs["reshard_after_forward"] = config.distributed.reshard_after_forward

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
