"""Size of a supervised run, computed before weights are loaded: examples, tokens, optimizer steps.

The data pool is prepared and its first samples are encoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rl4lms_like.core.errors import ConfigError, DataPoolError, ModelError, RL4LMsLikeError
from rl4lms_like.core.sample import Sample
from rl4lms_like.training.config.run_config import SupervisedConfig
from rl4lms_like.training.data_summary import prompt_lengths

FoundSamples: TypeAlias = Mapping[str, Sequence[Sample]] | None
"""Split -> samples; None if the data are not on this machine."""

N_ENCODED = 2000
"""Number of samples that are encoded to estimate the number of tokens."""


@dataclass(frozen=True)
class SupervisedPlan:
    """Size of a supervised run.

    Args:
        n_samples: number of samples in the split `train`.
        n_examples: number of examples, one for each reference.
        tokens_per_epoch: learned tokens, estimated from the first samples.
        prompts: description of the prompts' lengths.
        batch_size: examples per optimizer step.
        n_epochs: passes over the examples; the last one may be partial.
        steps: number of optimizer steps.
    """

    n_samples: int
    n_examples: int
    tokens_per_epoch: int
    prompts: str
    batch_size: int
    n_epochs: float
    steps: int

    def lines(self) -> list[tuple[str, str]]:
        """Return the plan as lines of name and value."""
        return [
            ("examples", f"{self.n_examples:,} references of {self.n_samples:,} samples"),
            ("prompts", self.prompts),
            ("learned tokens", f"about {self.tokens_per_epoch:,} per epoch"),
            ("batches", f"of {self.batch_size:,} examples"),
            ("optimizer steps", f"{self.steps:,} in {self.n_epochs:g} epochs"),
        ]


def plan_supervised(config: SupervisedConfig, find: Callable[[], FoundSamples]) -> SupervisedPlan:
    """Compute the size of the run of a config.

    Args:
        config: config of the run.
        find: prepares the samples of all splits; called last. Returns None if the data are not on this machine.

    Raises:
        ConfigError: `training_args` have mistakes.
        RL4LMsLikeError: the data, the tokenizer or the model's config cannot be loaded; the message names which.
    """
    from rl4lms_like.policies.loading import load_model_config
    from rl4lms_like.training.assemble import build_tokenizer, end_tokens, load_generation_config
    from rl4lms_like.training.small_models.embedded import with_embedded_models
    from rl4lms_like.training.supervised.assemble import check_family, check_settings, example_encoder
    from rl4lms_like.training.supervised.training_arguments import make_training_arguments

    check_settings(config)
    config = with_embedded_models(config)
    model_config = load_model_config(config.alg.model_name)
    check_family(config, model_config)
    tokenizer = build_tokenizer(config.tokenizer)
    ends = end_tokens(tokenizer, model_config, load_generation_config(config.alg.model_name))
    encoder = example_encoder(config, tokenizer, model_config, ends)
    found = find()
    if found is None:
        raise DataPoolError("the data were not loaded")
    samples = found["train"]
    examples = sum(len(sample.references) for sample in samples)
    encoded = encoder.encode(samples[:N_ENCODED])
    per_example = encoded.n_learned / max(len(encoded.rows), 1)
    arguments: Any = make_training_arguments(config, "checkpoints")
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    per_epoch = max(math.ceil(examples / batch), 1)
    limited = arguments.max_steps > 0
    steps = arguments.max_steps if limited else math.ceil(arguments.num_train_epochs * per_epoch)
    return SupervisedPlan(
        n_samples=len(samples),
        n_examples=examples,
        tokens_per_epoch=round(per_example * examples),
        prompts=prompt_lengths(
            [sample.prompt_or_input_text for sample in samples], tokenizer, encoder.max_prompt_length
        ),
        batch_size=batch,
        n_epochs=round(steps / per_epoch, 2) if limited else arguments.num_train_epochs,
        steps=steps,
    )


def check_supervised_weights(config: SupervisedConfig) -> None:
    """Refuse a model in a local folder that lacks weights.

    Raises:
        ModelError: weights are missing; the message names them.
    """
    from rl4lms_like.policies.loading import auto_class_of, check_model_weights, load_model_config
    from rl4lms_like.training.small_models.embedded import with_embedded_models

    model_name = with_embedded_models(config).alg.model_name
    try:
        model_config = load_model_config(model_name, local_files_only=True)
    except ModelError:  # `described` reports this error
        return
    check_model_weights(auto_class_of(model_config), model_name)


def described(config: SupervisedConfig, find: Callable[[], FoundSamples]) -> list[tuple[str, str]]:
    """Return the lines of the plan, or the reason why there is none.

    Raises:
        ConfigError: `training_args` or the device's name have mistakes.
    """
    from rl4lms_like.training.supervised.assemble import supervised_device_mistakes

    elsewhere = not supervised_device_mistakes(config.device, here=False)  # the device may exist on another machine
    try:
        return plan_supervised(replace(config, device="cpu") if elsewhere else config, find).lines()
    except ConfigError:
        raise
    except RL4LMsLikeError as error:
        return [("no plan", str(error))]
