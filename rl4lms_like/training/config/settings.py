"""Checks of an RL config that need torch, transformers or PEFT, and checks of models and tokenizers.

before anything is loaded    generation arguments, adapters, the device
with the models' configs     vocabulary, positions, prompts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from stable_baselines3.common.utils import get_device
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.core.errors import ConfigError, DataPoolError, Mistake, ModelError
from rl4lms_like.core.sample import Sample
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.generation import unknown_generation_arguments
from rl4lms_like.policies.lora import lora_conflicts
from rl4lms_like.policies.optimizer import make_optimizer
from rl4lms_like.policies.writing import NO_PROMPT
from rl4lms_like.rollouts.supported import unsupported_with
from rl4lms_like.training.config.run_config import RunConfig


def check_settings(config: RunConfig) -> None:
    """Check the settings of torch, transformers and PEFT before any weight is read.

    Raises:
        ConfigError: lists all mistakes.
    """
    mistakes = dict.fromkeys([*settings_mistakes(config), *_device_mistakes(config, here=True)])
    if mistakes:
        raise ConfigError(list(mistakes))


def settings_mistakes(config: RunConfig) -> list[Mistake]:
    """Return the mistakes in these settings that do not depend on this machine's devices."""
    places = {
        "alg.policy.args.generation_kwargs": config.alg.policy.args.get("generation_kwargs"),
        "train_evaluation.generation_kwargs": config.train_evaluation.generation_kwargs,
    }
    mistakes = [
        Mistake(f"{path}.{key}", message)
        for path, kwargs in places.items()
        for key, message in unknown_generation_arguments(kwargs or {}).items()
    ]
    mistakes += lora_conflicts(config.alg.policy.args.get("peft"), "alg.policy.args.peft")
    return [
        *mistakes,
        *_algorithm_mistakes(config),
        *_optimizer_mistakes(config),
        *_device_mistakes(config, here=False),
    ]


def _algorithm_mistakes(config: RunConfig) -> list[Mistake]:
    said = unsupported_with(ALGORITHMS.resolve(config.alg.id), POLICIES.resolve(config.alg.policy.id))
    return [Mistake("alg.id", f"{config.alg.id!r} cannot be trained on text rollouts: {said}")] if said else []


def _optimizer_mistakes(config: RunConfig) -> list[Mistake]:
    """Return the error that the optimizer raises for its arguments, tested on one weight."""
    kwargs = config.alg.policy.args.get("optimizer_kwargs")
    algorithm, policy = ALGORITHMS.resolve(config.alg.id), POLICIES.resolve(config.alg.policy.id)
    ours = hasattr(algorithm, "arguments_class") and hasattr(policy, "arguments_class")
    if not kwargs or not ours:
        return []
    rms_prop = config.alg.args.get("use_rms_prop", getattr(algorithm.arguments_class, "use_rms_prop", False))
    kind = torch.optim.RMSprop if rms_prop else torch.optim.AdamW
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
    try:
        make_optimizer(kind, groups, learning_rate=1e-3, optimizer_kwargs=kwargs)
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError) as error:
        return [Mistake("alg.policy.args.optimizer_kwargs", f"torch's {kind.__name__} does not accept them: {error}")]
    return []


def _device_mistakes(config: RunConfig, *, here: bool) -> list[Mistake]:
    own = config.alg.args.get("device")
    return device_mistakes(own or config.device, "alg.args.device" if own else "device", here=here)


def device_mistakes(device: str, path: str = "device", *, here: bool = True) -> list[Mistake]:
    """Return the mistake in a config's device: on this machine, or on any machine if `here` is false."""
    try:
        chosen = get_device(device)
    except RuntimeError:
        return [Mistake(path, f"expected auto, cpu, cuda, cuda:1 or the like, got {device!r}")]
    if here and device != "auto" and chosen.type != torch.device(device).type:
        return [Mistake(path, f"{device!r} is not available here; use auto for an available device")]
    return []


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig, tokenizer_name: str, model_name: str
) -> None:
    """Raise a `ModelError` if the tokenizer has tokens that the model cannot embed."""
    vocab_size = int(model_config.get_text_config().vocab_size)
    if len(tokenizer) > vocab_size:
        raise ModelError(
            f"the tokenizer {tokenizer_name!r} has {len(tokenizer)} tokens, the model {model_name!r} only "
            f"{vocab_size}: some prompts could not be embedded. Use the model's own tokenizer"
        )


def check_prompts(
    samples: Mapping[str, Sequence[Sample]], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> None:
    """Raise a `DataPoolError` if a decoder-only model would have to continue an empty prompt."""
    if model_config.is_encoder_decoder or tokenizer("")["input_ids"]:
        return
    for split, members in samples.items():
        empty = [sample.id for sample in members if not sample.prompt_or_input_text]
        if empty:
            raise DataPoolError(
                f"the prompts of {len(empty)} samples of {split!r} are empty ({empty[0]!r}): {NO_PROMPT}"
            )


def check_positions(
    model_config: PretrainedConfig, network: str, max_prompt_length: int, max_episode_length: int
) -> None:
    """Raise a `ConfigError` if a network has fewer positions than an episode may need."""
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return
    seq2seq = bool(model_config.is_encoder_decoder)
    needed = max(max_prompt_length, max_episode_length) if seq2seq else max_prompt_length + max_episode_length
    if needed > positions:
        what = "the longer of prompt and response" if seq2seq else "prompt and response together"
        raise ConfigError(
            [
                Mistake(
                    "env.args",
                    f"{network} has {positions} positions, {what} may need {needed} (max_prompt_length "
                    f"{max_prompt_length}, response {max_episode_length}): reduce these lengths",
                )
            ]
        )
