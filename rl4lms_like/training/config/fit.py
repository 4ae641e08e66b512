"""Check that the models, the tokenizer and the lengths of an RL run are compatible, without reading weights.

tokenizer   has no token that the policy cannot embed
models      policy, critic and reference are of the family that `alg.policy.id` supports
lengths     prompt and response fit into the positions of each
weights     local folders have all weights of their configs, by name and shape
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.core.model_weights import output_layer
from rl4lms_like.envs.arguments import EnvArguments
from rl4lms_like.envs.env import length_limit
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.generation import generate_arguments
from rl4lms_like.policies.loading import auto_class_of, check_model_weights
from rl4lms_like.training.config.run_config import RunConfig
from rl4lms_like.training.config.settings import check_positions, check_vocabulary

ARGS = "alg.policy.args"
_NETWORKS = {"model_name": "the model", "critic_model": "the critic", "reference_model": "the reference"}
"""Argument of a policy that names a model -> its description in messages."""

Networks = Mapping[str, PretrainedConfig]
"""`model_name`, and if the run has them `critic_model` and `reference_model` -> the model's config."""


def load_networks(config: RunConfig, load: Callable[[PolicyArguments], PretrainedConfig]) -> Networks:
    """Return the configs of all models that a run loads.

    Args:
        config: of the run, with a folder in place of each embedded model.
        load: loads the config of the model in a policy's arguments.

    Raises:
        ModelError: a config cannot be loaded.
    """
    arguments = PolicyArguments.known_in(config.alg.policy.args)
    names = {key: getattr(arguments, key) for key in _NETWORKS}
    if config.alg.kl_div.coeff == 0:
        names["reference_model"] = None  # not loaded
    return {key: load(replace(arguments, model_name=name)) for key, name in names.items() if name is not None}


def check_fit(config: RunConfig, tokenizer: PreTrainedTokenizerBase, networks: Networks) -> None:
    """Check the families of the models and the vocabulary of the tokenizer.

    Raises:
        ConfigError: the policy does not support the family of a model.
        ModelError: the tokenizer has tokens that the policy does not have.
    """
    wanted = getattr(POLICIES.resolve(config.alg.policy.id), "auto_class", None)
    mistakes = []
    for key, network in networks.items():
        if wanted is not None and auto_class_of(network) is not wanted:
            kind = "an encoder-decoder" if network.is_encoder_decoder else "a decoder-only"
            said = f"{config.alg.policy.args[key]!r} is {kind} model, which {config.alg.policy.id} does not support"
            mistakes.append(Mistake(f"{ARGS}.{key}", said))
    if mistakes:
        raise ConfigError(mistakes)
    model_name = config.alg.policy.args["model_name"]
    check_vocabulary(tokenizer, networks["model_name"], config.tokenizer.model_name, model_name)


def check_weights(config: RunConfig, networks: Networks) -> bool:
    """Compare the weights of models in local folders with their configs, by name and shape.

    Returns:
        Whether all weights could be compared; loading compares them in any case.

    Raises:
        ModelError: weights are missing, have another shape, or belong to layers that the config does not build.
    """
    arguments = PolicyArguments.known_in(config.alg.policy.args)
    compared = [
        check_model_weights(
            auto_class_of(network),
            getattr(arguments, key),
            role=_NETWORKS[key].removeprefix("the "),
            unused=output_layer if key == "critic_model" else None,
            trust_remote_code=arguments.trust_remote_code,
        )
        for key, network in networks.items()
    ]
    return all(compared)


def check_lengths(config: RunConfig, tokenizer: PreTrainedTokenizerBase, networks: Networks) -> tuple[int, int]:
    """Return the maximum lengths of prompt and response in tokens, after a check against the networks' positions.

    Raises:
        ConfigError: a network has fewer positions than they need, or no limit of the prompt length is known.
    """
    prompt, response = prompt_length(config, tokenizer), response_length(config, networks["model_name"])
    for key, network in networks.items():
        check_positions(network, _NETWORKS[key], prompt, response)
    return prompt, response


def prompt_length(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the maximum prompt length in tokens: the config's `max_prompt_length`, else the tokenizer's limit.

    Raises:
        ConfigError: neither is given.
    """
    given = config.env.args.get("max_prompt_length")
    if given is not None:
        return int(given)
    try:
        return length_limit(tokenizer)
    except ConfigError as error:
        raise ConfigError([Mistake(f"env.args.{one.path}", one.message) for one in error.mistakes]) from error


def response_length(config: RunConfig, network: PretrainedConfig) -> int:
    """Return the maximum response length in tokens: the generation limit or `max_episode_length`, whichever is less."""
    asked = generate_arguments(
        config.alg.policy.args.get("generation_kwargs") or {},
        max_new_tokens=EnvArguments(**config.env.args).max_episode_length,
        eos_token_ids=(),
        is_encoder_decoder=bool(network.is_encoder_decoder),
    )
    return int(asked["max_new_tokens"])
