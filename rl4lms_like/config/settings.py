"""Checks of an RL config that need torch, transformers or PEFT; no weights are read.

settings    generation arguments, adapters, optimizer, device
tokenizer   has no token that the policy cannot embed
models      policy, critic and reference are of the family that `alg.policy.id` supports
lengths     prompt and response fit into the positions of each
weights     local folders have all weights of their configs, by name and shape
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from stable_baselines3.common.utils import get_device
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl4lms_like.algorithms import ALGORITHMS
from rl4lms_like.algorithms.base import NO_BALANCING_LOSS, OnPolicyTextAlgorithm
from rl4lms_like.config.run_config import RunConfig
from rl4lms_like.core.continuation import stripped_tokens
from rl4lms_like.core.model_weights import output_layer
from rl4lms_like.core.observation import NO_LIMIT, TextLayout, refuse_images
from rl4lms_like.core.picture_encoder import PictureEncoder
from rl4lms_like.core.sample import Sample
from rl4lms_like.core.stop_strings import KEY as STOP_STRINGS
from rl4lms_like.core.stop_strings import stop_strings_of
from rl4lms_like.engines.arguments import longest_response
from rl4lms_like.envs.env import length_limit
from rl4lms_like.policies import POLICIES
from rl4lms_like.policies.arguments import ADAMW, PolicyArguments
from rl4lms_like.policies.faster_layers import reasons_without_effect
from rl4lms_like.policies.generation import NO_PROMPT, unknown_generation_arguments
from rl4lms_like.policies.loading import auto_class_of, check_model_weights, is_loaded_by, load_tokenizer
from rl4lms_like.policies.lora import lora_conflicts
from rl4lms_like.policies.optimizers import make_optimizer, optimizer_class_of
from rl4lms_like.policies.parity import dependence_on_batch, longest_independent_of_batch
from rl4lms_like.policies.quantization import require_package
from rl4lms_like.policies.routing import has_balancing_loss
from rl4lms_like.policies.speedups import PATH as SPEEDUPS
from rl4lms_like.policies.speedups import no_speedups
from rl4lms_like.rollouts.supported import unsupported_with
from rl4lms_like.system.errors import ConfigError, ConfigIssue, DataPoolError, ModelError, Notice

ARGS = "alg.policy.args"
_NETWORKS = {
    "model_name": "the model",
    "critic_model": "the critic",
    "reference_model": "the reference",
    "teacher_model": "the teacher",
}
"""Argument of a policy that names a model -> its description in messages."""

Networks = Mapping[str, PretrainedConfig]
"""`model_name`, and if the run has them `critic_model`, `reference_model` and `teacher_model` -> the model's config."""


def check_settings(config: RunConfig, *, here: bool = True) -> None:
    """Check the settings of torch, transformers and PEFT before any weight is read; with `here`, also the device.

    Raises:
        ConfigError: lists all errors.
    """
    policy_args = config.alg.policy.args
    issues = generation_issues(policy_args.get("generation_kwargs"), f"{ARGS}.generation_kwargs")
    issues += generation_issues(config.train_evaluation.generation_kwargs, "train_evaluation.generation_kwargs")
    issues += lora_conflicts(policy_args.get("peft"), f"{ARGS}.peft")
    require_package(policy_args.get("quantization"))
    issues += attention_issues(policy_args.get("attn_implementation"), f"{ARGS}.attn_implementation")

    algorithm = ALGORITHMS.resolve(config.alg.id)
    policy = POLICIES.resolve(config.alg.policy.id)
    if text := unsupported_with(algorithm, policy):
        issues.append(ConfigIssue("alg.id", f"{config.alg.id!r} cannot be trained on text rollouts: {text}"))

    if config.alg.ptx is not None and not issubclass(algorithm, OnPolicyTextAlgorithm):
        text = f"cannot be used with {config.alg.id!r}: only algorithms of this library add the loss on texts"
        issues.append(ConfigIssue("alg.ptx", text))

    # The optimizer is known for the library's own classes and those derived from them.
    if hasattr(algorithm, "arguments_class") and hasattr(policy, "arguments_class"):
        rms_prop = config.alg.algorithm.values.get("use_rms_prop", False)
        optimizer = policy_args.get("optimizer", {"id": ADAMW})
        kind = torch.optim.RMSprop if rms_prop else optimizer_class_of(optimizer["id"])
        issues += _optimizer_issues(kind, policy_args.get("optimizer_kwargs") or {})

    # The device of the algorithm replaces that of the config; two of the networks can have others.
    device = config.alg.args.get("device")
    issues += device_issues(device or config.device, "alg.args.device" if device else "device", here=here)
    for key in ("critic_device", "reference_device"):
        if policy_args.get(key) is not None:
            issues += device_issues(policy_args[key], f"{ARGS}.{key}", here=here)
    if issues:
        raise ConfigError(issues)


def generation_issues(kwargs: Mapping[str, Any] | None, path: str) -> list[ConfigIssue]:
    """Return an error for each generation argument at a path of the config that transformers does not accept."""
    unknown = unknown_generation_arguments(kwargs or {})
    return [ConfigIssue(f"{path}.{key}", message) for key, message in unknown.items()]


def _optimizer_issues(kind: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> list[ConfigIssue]:
    """Return the error that an optimizer raises for its arguments, tested on one weight."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
    try:
        make_optimizer(kind, groups, learning_rate=1e-3, optimizer_kwargs=kwargs)
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError) as error:
        return [ConfigIssue(f"{ARGS}.optimizer_kwargs", f"{kind.__name__} does not accept them: {error}")]
    return []


def attention_issues(name: str | None, path: str) -> list[ConfigIssue]:
    """Return an error if transformers has no attention of this name; kernels of the hub are found when they load."""
    known = ("eager", *ALL_ATTENTION_FUNCTIONS.keys())
    if name is None or "/" in name or name in known:
        return []
    return [ConfigIssue(path, f"expected one of {', '.join(sorted(known))}; got {name!r}")]


def device_issues(device: str, path: str = "device", *, here: bool = True) -> list[ConfigIssue]:
    """Return the error in a config's device: on this machine, or on any machine if `here` is false."""
    try:
        chosen = get_device(device)
    except RuntimeError:
        return [ConfigIssue(path, f"expected auto, cpu, cuda, cuda:1 or the like, got {device!r}")]
    if here and device != "auto" and chosen.type != torch.device(device).type:
        return [ConfigIssue(path, f"{device!r} is not available here; use auto for an available device")]
    return []


def n_tokens(network: PretrainedConfig) -> int:
    """Return the number of tokens in a model's vocabulary."""
    return int(network.get_text_config().vocab_size)


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig, tokenizer_name: str, model_name: str
) -> None:
    """Raise a `ModelError` if the tokenizer has tokens that the model cannot embed, or there are two vocabularies."""
    # FSMT and Marian can have one vocabulary for prompts and another one for responses.
    n_source = getattr(model_config, "src_vocab_size", None) or model_config.get_text_config().vocab_size
    n_target = getattr(model_config, "decoder_vocab_size", None) or n_tokens(model_config)
    if n_source != n_target:
        text = f"the model {model_name!r} has {n_source} tokens in prompts and {n_target} in responses"
        raise ModelError(f"{text}: only models with one vocabulary for both are supported")

    vocab_size = n_tokens(model_config)
    if len(tokenizer) > vocab_size:
        text = (
            f"the tokenizer {tokenizer_name!r} has {len(tokenizer)} tokens, the model {model_name!r} only {vocab_size}"
        )
        raise ModelError(f"{text}: use the model's own tokenizer")


def check_prompts(
    samples: Mapping[str, Sequence[Sample]],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PretrainedConfig,
    *,
    pictures: PictureEncoder | None = None,
    max_prompt_length: int = NO_LIMIT,
) -> None:
    """Check that a model can read all prompts, before it is loaded.

    Args:
        samples: by split.
        tokenizer: of the model.
        model_config: config of the model.
        pictures: encoder of prompts with pictures; None if the model reads texts only.
        max_prompt_length: tokens; prompts with pictures are not truncated.

    Raises:
        DataPoolError: a decoder-only model would have to continue an empty prompt; or prompts have pictures that the
            model does not read, or are too long with them.
    """
    of_all_splits = [sample for members in samples.values() for sample in members]
    if pictures is not None:
        pictures.register(of_all_splits, max_prompt_length)
    else:
        refuse_images(of_all_splits)
    if model_config.is_encoder_decoder or len(TextLayout(tokenizer, NO_LIMIT, 1).encode("")):
        return
    for split, members in samples.items():
        empty = [sample.id for sample in members if not (sample.rendered_prompt or sample.prompt_or_input_text)]
        if empty:
            text = f"the prompts of {len(empty)} samples of {split!r} are empty ({empty[0]!r})"
            raise DataPoolError(f"{text}: {NO_PROMPT}")


def speedups_without_effect(config: RunConfig, network: PretrainedConfig) -> list[Notice]:
    """Return a notice for each speedup that is set to true and cannot change the run on this machine.

    `network` is the config of the policy's model.
    """
    # A run stores all speedups, also those that nobody asked for.
    arguments = PolicyArguments.known_in(config.alg.policy.args)
    chosen = arguments.speedups
    if set(chosen) == set(no_speedups()):
        return []

    device = config.alg.args.get("device") or config.device
    if device_issues(device):  # reported on its own
        return []
    reasons = reasons_without_effect(
        arguments,
        network,
        is_on_processor=get_device(device).type == "cpu",
        is_sharded=config.distributed.strategy == "fsdp",
    )
    notices = []
    for key, reason in reasons.items():
        if chosen.get(key):
            notices.append(Notice(f"{SPEEDUPS}.{key}", f"no effect: {reason}"))
    return notices


def load_networks(config: RunConfig, load: Callable[[PolicyArguments], PretrainedConfig]) -> Networks:
    """Return the configs of all models that a run loads; `load` returns that of the model in a policy's arguments."""
    arguments = PolicyArguments.known_in(config.alg.policy.args)
    names = {key: getattr(arguments, key) for key in _NETWORKS}
    if config.alg.kl_div.coeff == 0:
        names["reference_model"] = None  # not loaded
    return {key: load(replace(arguments, model_name=name)) for key, name in names.items() if name is not None}


def check_ranks(config: RunConfig, n_ranks: int) -> None:
    """Check that the processes of a run can share its work.

    Raises:
        ConfigError: the environments cannot be divided among them, or a setting needs a single process.
    """
    if n_ranks == 1:
        return
    issues = []
    if config.env.vec_env != "text":
        issues.append(ConfigIssue("env.vec_env", f"{n_ranks} processes need vec_env: text"))
    if config.train_evaluation.replay is not None:
        issues.append(ConfigIssue("train_evaluation.replay", "needs a single process; start it without torchrun"))

    # Each process generates the responses of whole groups.
    n_envs = config.env.n_envs
    size = config.alg.algorithm.values.get("group_size") or 1
    if n_envs % (n_ranks * size):
        of_groups = f" in groups of {size}" if size > 1 else ""
        text = f"{n_envs} environments{of_groups} cannot be divided among {n_ranks} processes"
        issues.append(ConfigIssue("env.n_envs", text))
    if issues:
        raise ConfigError(issues)


def check_fit(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, networks: Networks, *, local_files_only: bool = False
) -> None:
    """Check the families and vocabularies of the models and the vocabulary of the tokenizer.

    Raises:
        ConfigError: the policy does not support the family of a model, the models have different vocabularies, or a
            stop string contains a special token.
        ModelError: the tokenizer has tokens that the policy does not have, or the teacher has no tokenizer.
    """
    check_families(config, networks)
    issues = []
    if "teacher_model" in networks:
        issues += _tokenizer_issues(config, tokenizer, "teacher_model", local_files_only)

    for string in stop_strings_of(config.alg.policy.args.get("generation_kwargs")):
        special = [token for token in stripped_tokens(tokenizer) if token in string]
        if special:
            text = f"{string!r} never occurs: responses are decoded without special tokens such as {special[0]!r}"
            issues.append(ConfigIssue(f"{ARGS}.generation_kwargs.{STOP_STRINGS}", text))
    if issues:
        raise ConfigError(issues)

    model_name = config.alg.policy.args["model_name"]
    check_vocabulary(tokenizer, networks["model_name"], config.tokenizer.model_name, model_name)


def check_families(config: RunConfig, networks: Networks) -> None:
    """Check the families and vocabularies of the models.

    Raises:
        ConfigError: the policy does not support the family of a model, or the models have different vocabularies.
    """
    issues = []
    for key, network in networks.items():
        issues += _network_issues(config, key, network, n_policy_tokens=n_tokens(networks["model_name"]))
    if issues:
        raise ConfigError(issues)


def _network_issues(
    config: RunConfig, key: str, network: PretrainedConfig, *, n_policy_tokens: int
) -> list[ConfigIssue]:
    """Return the error of a model of another family or vocabulary than the policy's."""
    auto_class = getattr(POLICIES.resolve(config.alg.policy.id), "auto_class", None)
    if auto_class is not None and not is_loaded_by(network, auto_class):
        kind = kind_of_model(network)
        text = f"{config.alg.policy.args[key]!r} is {kind} model, which {config.alg.policy.id} does not support"
        return [ConfigIssue(f"{ARGS}.{key}", text)]

    adds_balancing_loss = getattr(ALGORITHMS.resolve(config.alg.id), "adds_balancing_loss", True)
    if key == "model_name" and has_balancing_loss(network) and not adds_balancing_loss:
        return [ConfigIssue(f"{ARGS}.{key}", f"{config.alg.policy.args[key]!r} has {NO_BALANCING_LOSS}")]

    # Vocabularies of one tokenizer may be padded differently. The KL compares log-probs of all tokens of the reference.
    n_network_tokens = n_tokens(network)
    if n_network_tokens < n_policy_tokens or (key == "reference_model" and n_network_tokens != n_policy_tokens):
        text = f"{_NETWORKS[key]} has {n_network_tokens} tokens, the policy {n_policy_tokens}"
        return [ConfigIssue(f"{ARGS}.{key}", f"{text}: they must have the same vocabulary")]
    return []


def kind_of_model(network: PretrainedConfig) -> str:
    """Return the kind of a language model with its article, for messages."""
    if network.is_encoder_decoder:
        return "an encoder-decoder"
    return "a vision-language" if auto_class_of(network) is AutoModelForImageTextToText else "a decoder-only"


def _tokenizer_issues(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, key: str, local_files_only: bool
) -> list[ConfigIssue]:
    """Return the error of a model whose own tokenizer has other tokens than that of the run."""
    name = config.alg.policy.args[key]
    is_trusted = bool(config.alg.policy.args.get("trust_remote_code"))
    other = load_tokenizer(name, trust_remote_code=is_trusted, local_files_only=local_files_only)
    n_different = len(set(other.get_vocab().items()) ^ set(tokenizer.get_vocab().items()))
    if not n_different:
        return []
    text = f"{_NETWORKS[key]} {name!r} has another tokenizer than {config.tokenizer.model_name!r}"
    return [ConfigIssue(f"{ARGS}.{key}", f"{text}: {n_different} tokens differ")]


def check_weights(config: RunConfig, networks: Networks) -> bool:
    """Compare the weights of models in local folders with their configs, by name and shape.

    Returns:
        Whether all weights could be compared; loading compares them in any case.

    Raises:
        ModelError: weights are missing, have another shape, or belong to layers that the config does not build.
    """
    arguments = PolicyArguments.known_in(config.alg.policy.args)
    auto_class = getattr(POLICIES.resolve(config.alg.policy.id), "auto_class", None)
    compared = [
        check_model_weights(
            auto_class or auto_class_of(network),
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
        ConfigError: a network has fewer positions than they need, its log-probs would depend on the batch, or no limit
            of the prompt length is known.
    """
    prompt = _prompt_length(config, tokenizer)
    response = response_length(config, networks["model_name"])
    # `max_episode_length` does not limit evaluations.
    evaluated_kwargs = config.train_evaluation.generation_kwargs
    if evaluated_kwargs is None:
        evaluated_kwargs = config.alg.policy.args.get("generation_kwargs") or {}

    for key, network in networks.items():
        positions = getattr(network.get_text_config(), "max_position_embeddings", None)
        # An encoder-decoder has two texts, each with positions of its own.
        needed = max(prompt, response) if network.is_encoder_decoder else prompt + response
        what = "the longer of prompt and response" if network.is_encoder_decoder else "prompt and response together"
        if positions is not None and needed > positions:
            text = f"{_NETWORKS[key]} has {positions} positions, {what} may need {needed} (max_prompt_length {prompt}, "
            raise ConfigError([ConfigIssue("env.args", f"{text}response {response}): reduce these lengths")])

        # Only the model itself writes the responses of evaluations, which may be longer than those of rollouts.
        limit = longest_independent_of_batch(network)
        if limit is None:
            continue
        longest = response
        if key == "model_name" and config.env.dialogue is None:
            longest = max(response, longest_response(evaluated_kwargs, is_causal=not network.is_encoder_decoder))
        needed = max(prompt, longest) if network.is_encoder_decoder else prompt + longest
        if needed > limit:
            text = f"{_NETWORKS[key]} may need {needed} tokens (max_prompt_length {prompt}, response {longest}): "
            raise ConfigError([ConfigIssue("env.args", text + dependence_on_batch(limit))])
    return prompt, response


def _prompt_length(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the maximum prompt length in tokens: the config's `max_prompt_length`, else the tokenizer's limit."""
    limit = config.env.arguments.max_prompt_length
    if limit is not None:
        return limit
    try:
        return length_limit(tokenizer)
    except ConfigError as error:
        raise ConfigError([one.below("env.args") for one in error.issues]) from error


def response_length(config: RunConfig, network: PretrainedConfig) -> int:
    """Return the maximum response length in tokens: the generation limit or `max_episode_length`, whichever is less.

    Of a dialogue, it is the length of all turns and answers together, `max_episode_length`.
    """
    if config.env.dialogue is not None:
        return config.env.arguments.max_episode_length
    kwargs = config.alg.policy.args.get("generation_kwargs") or {}
    limit = longest_response(kwargs, is_causal=not network.is_encoder_decoder)
    return min(limit, config.env.arguments.max_episode_length)
