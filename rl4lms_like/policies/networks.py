"""Loading of a policy's networks from checkpoints.

    policy      model_name                     all weights trained, or adapters only (`peft`)
    critic      the same, or critic_model      separate adapters if the policy has adapters; `separate` only
    reference   the same, or reference_model   frozen

Each checkpoint is read once. Networks from the same checkpoint share their frozen weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PretrainedConfig, PreTrainedModel

from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.model_weights import Unused, output_layer
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.loading import (
    checkpoint_activations,
    load_model,
    load_model_config,
    without_output_layer,
)
from rl4lms_like.policies.lora import add_lora, copy_sharing_frozen, refuse_unknown_layers


class Networks(NamedTuple):
    """Language models of an actor-critic; `dropout_rates` are those of the policy's checkpoint."""

    policy: PreTrainedModel
    critic: PreTrainedModel | None
    reference: PreTrainedModel | None
    dropout_rates: dict[str, float]


def load_networks(auto_class: Any, arguments: PolicyArguments, *, use_reference: bool) -> Networks:
    """Load the networks of a policy.

    Args:
        auto_class: transformers' `AutoModelFor...`.
        arguments: arguments of the policy.
        use_reference: load a reference model.

    Raises:
        ModelError: a checkpoint cannot be loaded, or is not valid for its role.
        MissingExtraError: PEFT is needed and not installed.
    """
    _check_critic(arguments)
    policy, dropout_rates = _load(auto_class, arguments.model_name, arguments)
    if arguments.peft is not None:
        policy.requires_grad_(False)  # before it is copied: copies share frozen weights
    critic = reference = None
    if arguments.critic == "separate":
        critic = _like(policy, auto_class, arguments.critic_model, arguments, role="critic", unused=output_layer)
    if use_reference:
        reference = _like(policy, auto_class, arguments.reference_model, arguments, role="reference")
        reference.requires_grad_(False)
    trained = [model for model in (policy, critic) if model is not None]
    if arguments.peft is not None:
        refuse_unknown_layers(trained, arguments.peft)
    for model in trained:
        if arguments.peft is not None:
            add_lora(model, arguments.peft, dropout=arguments.dropout)
        if arguments.gradient_checkpointing:
            checkpoint_activations(model)
    return Networks(policy, None if critic is None else without_output_layer(critic), reference, dropout_rates)


def _like(
    policy: PreTrainedModel,
    auto_class: Any,
    model_name: str | None,
    arguments: PolicyArguments,
    *,
    role: str,
    unused: Unused | None = None,
) -> PreTrainedModel:
    """Return a network from another checkpoint, or a copy of the policy."""
    if model_name in (None, arguments.model_name):
        return copy_sharing_frozen(policy)
    return _load(auto_class, str(model_name), arguments, role=role, unused=unused)[0]


def _load(
    auto_class: Any, model_name: str, arguments: PolicyArguments, *, role: str = "model", unused: Unused | None = None
) -> tuple[PreTrainedModel, dict[str, float]]:
    return load_model(
        auto_class,
        model_name,
        role=role,
        unused=unused,
        dropout=arguments.dropout,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
    )


def _check_critic(arguments: PolicyArguments) -> None:
    if arguments.critic_model is None:
        return
    if arguments.critic != "separate":
        raise ModelError("critic_model requires critic: separate")
    policy, critic = (
        load_model_config(name, trust_remote_code=arguments.trust_remote_code)
        for name in (arguments.model_name, arguments.critic_model)
    )
    if bool(policy.is_encoder_decoder) != bool(critic.is_encoder_decoder):
        raise ModelError(
            f"the critic {arguments.critic_model!r} is {_family(critic)}, but the policy "
            f"{arguments.model_name!r} is {_family(policy)}: both must be of the same kind"
        )
    of_critic, of_policy = (int(config.get_text_config().vocab_size) for config in (critic, policy))
    if of_critic != of_policy:
        raise ModelError(
            f"the critic {arguments.critic_model!r} has {of_critic} tokens, but the policy "
            f"{arguments.model_name!r} has {of_policy}: both must have the same vocabulary"
        )


def _family(config: PretrainedConfig) -> str:
    return "an encoder-decoder model" if config.is_encoder_decoder else "a decoder-only model"
