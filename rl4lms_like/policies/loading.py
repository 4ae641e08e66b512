"""Loading and saving of models, tokenizers and a policy's networks, from a hub id or a local folder.

    policy      model_name                     all weights trained, or adapters only (`peft`)
    critic      the same, or critic_model      separate adapters if the policy has adapters; `separate` only
    reference   the same, or reference_model   frozen
                or teacher_model

Each checkpoint is read once. Networks from the same checkpoint share their frozen weights. A name may also be that of
an adapter (`adapter_config.json`, as PEFT writes it). The model is then its base with the adapter merged into the
weights. Up to version 0.2.0, the base of an adapter could itself be an adapter.

A model is saved whole, for `AutoModel*.from_pretrained`, or as adapters only, for PEFT:

    whole      config.json  model.safetensors  generation_config.json                   tokenizer
    adapters   adapter_config.json  adapter_model.safetensors  generation_config.json   tokenizer
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from rl4lms_like.core.model_weights import Unused, cannot_load, check_complete, load_complete, output_layer, place_of
from rl4lms_like.policies.arguments import PolicyArguments
from rl4lms_like.policies.full_weights import write_full_weights
from rl4lms_like.policies.lora import (
    add_lora,
    copy_sharing_frozen,
    has_lora,
    merge_adapter_folder,
    needs_values,
    refuse_unknown_layers,
    require_stackable,
    save_adapters,
)
from rl4lms_like.policies.low_precision import store_in_bfloat16
from rl4lms_like.policies.quantized_layers import quantize
from rl4lms_like.policies.routing import switch_off_router_logits, with_saved_setting
from rl4lms_like.policies.sharding import whole
from rl4lms_like.policies.unread_weights import read_buffers, unread_checkpoint
from rl4lms_like.policies.vision_parts import freeze_vision, within_scope
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.out_of_memory import is_out_of_memory

VALUE_HEAD = "value_head.safetensors"
"""File with the weight of a saved critic's head, next to its network."""


def load_tokenizer(
    model_name: str,
    *,
    pad_token_as_eos_token: bool = True,
    padding_side: str = "left",
    truncation_side: str = "left",
    trust_remote_code: bool = False,
    local_files_only: bool = False,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer; of an adapter without one, the tokenizer of its base.

    With `pad_token_as_eos_token` a missing pad token is set to the end-of-text token. With `local_files_only` the hub
    is not queried.

    Raises:
        ModelError: it cannot be loaded, there is no token for padding, or adapters are based on each other.
    """
    location = _tokenizer_location(model_name, local_files_only=local_files_only)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            location,
            padding_side=padding_side,
            truncation_side=truncation_side,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
        )
    except Exception as error:
        raise ModelError(cannot_load("tokenizer", model_name, error)) from error

    # How it was loaded, which transformers would save with it: the model may be loaded elsewhere.
    tokenizer.init_kwargs.pop("local_files_only", None)
    if pad_token_as_eos_token:
        set_pad_token(tokenizer, model_name)
    return tokenizer


def set_pad_token(tokenizer: PreTrainedTokenizerBase, model_name: str) -> None:
    """Set a missing pad token to the end-of-text token.

    Raises:
        ModelError: the tokenizer has neither.
    """
    # GPT-2 and Llama, for instance, have no pad token. Masks never depend on it, so any token will do.
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokenizer of {model_name!r} has neither a pad token nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token


def load_model(
    auto_class: Any,
    model_name: str,
    *,
    role: str = "model",
    unused: Unused | None = None,
    dropout: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    n_labels: int | None = None,
    local_files_only: bool = False,
    quantization: Mapping[str, Any] | None = None,
    unread: bool = False,
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Load a model in float32; return it and the dropout rates of its checkpoint.

    Args:
        auto_class: transformers' `AutoModelFor...`.
        model_name: hub id or local folder, of a model or of an adapter.
        role: name of its role in error messages.
        unused: see `core.model_weights.load_complete`.
        dropout: keep the rates of the model's config; otherwise all of them are set to 0.
        attn_implementation: transformers' argument; None means transformers' default.
        trust_remote_code: run code that is part of the model.
        n_labels: number of outputs of a classifier; default: that of the model's config.
        local_files_only: do not query the hub.
        quantization: quantize its linear layers, and freeze all weights; see `policies.quantization`.
        unread: leave the matrices of its checkpoint unread where that is possible; see `policies.unread_weights`.

    Raises:
        ModelError: it cannot be loaded, or weights are missing.
        MissingExtraError: it is an adapter, and PEFT is not installed; or the package that quantizes is not.
    """
    *adapters, model_name = checkpoint_chain(model_name, local_files_only=local_files_only)
    try:
        config = AutoConfig.from_pretrained(
            model_name, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except Exception as error:
        raise ModelError(cannot_load(role, model_name, error)) from error
    if n_labels is not None:
        config.num_labels = n_labels

    # In the config, before the model is built: layers read their rates from it only then.
    rates = dropout_rates(config)
    if not dropout:
        set_dropout_rates(config, dict.fromkeys(rates, 0.0))

    # Weights are float32 whatever the checkpoint's precision: small steps of an optimizer are lost in bfloat16.
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "local_files_only": local_files_only}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    named: dict[str, Any] = {"role": role, "model_name": model_name, "unused": unused}

    # Adapters are merged into values, and values are quantized.
    model = None
    if unread and not adapters and quantization is None and not trust_remote_code:
        model = _load_unread(auto_class, named, options)
    if model is None:
        model = load_complete(auto_class, model_name, trust_remote_code=trust_remote_code, **named, **options)
    for folder in reversed(adapters):
        model = merge_adapter_folder(model, folder)
    switch_off_router_logits(model)
    if quantization is not None:
        quantize(model, quantization)

    # The language model of a multimodal model has its own nested config; keep only the rates of that part.
    prefix = ""
    for name, value in vars(config).items():
        if type(value) is type(model.config):
            prefix = f"{name}."
            break
    rates = {name.removeprefix(prefix): rate for name, rate in rates.items() if name.startswith(prefix)}
    return model, rates


def _load_unread(auto_class: Any, named: Mapping[str, Any], options: dict[str, Any]) -> PreTrainedModel | None:
    """Load a model whose matrices are not read yet; None if this model has to be loaded whole.

    Args:
        auto_class: transformers' `AutoModelFor...`.
        named: the arguments of `load_complete` that messages need.
        options: those that transformers gets.
    """
    model_name = named["model_name"]
    local_files_only = options["local_files_only"]

    # transformers reports an operation that needs values as a failed conversion.
    library = logging.getLogger("transformers.modeling_utils")
    was_disabled = library.disabled
    library.disabled = True
    try:
        tensors = unread_checkpoint(model_name, options["config"], local_files_only=local_files_only)
        if tensors is None:
            return None

        # Only the model's own class loads tensors that it is given.
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model_class = type(auto_class.from_config(options["config"]))
        model: PreTrainedModel = load_complete(model_class, None, state_dict=tensors, **named, **options)
    except Exception as error:  # repeated by the whole load, if values are not all that is missing
        if is_out_of_memory(error):
            raise
        return None
    finally:
        library.disabled = was_disabled
    read_buffers(model)

    # What transformers takes from the folder of a model that it loads by its name.
    model.name_or_path = model_name
    model.config.name_or_path = model_name
    if model.can_generate():
        try:
            generation = GenerationConfig.from_pretrained(model_name, local_files_only=local_files_only)
        except OSError:
            generation = GenerationConfig.from_pretrained(
                model_name, "config.json", local_files_only=local_files_only, _from_model_config=True
            )
        model.generation_config = generation
    return model


def check_model_weights(
    auto_class: Any,
    model_name: str,
    *,
    role: str = "model",
    unused: Unused | None = None,
    trust_remote_code: bool = False,
) -> bool:
    """Raise if a local folder lacks weights, without reading them; arguments as in `load_model`.

    Returns:
        False if the weights could not be compared.

    Raises:
        ModelError: weights are missing, or the folder cannot be read.
    """
    folder = whole_checkpoint(model_name, local_files_only=True)
    return check_complete(
        auto_class, folder, role=role, model_name=folder, unused=unused, trust_remote_code=trust_remote_code
    )


def adapter_base(model_name: str, *, local_files_only: bool = False) -> str | None:
    """Return the base model of an adapter, or None if `model_name` is not an adapter.

    Args:
        model_name: hub id or local folder.
        local_files_only: do not query the hub.

    Raises:
        ModelError: the adapter does not name its base, or the base is a folder that does not exist.
    """
    try:
        file = find_adapter_config_file(place_of(model_name), local_files_only=local_files_only)
    except (OSError, ValueError):  # not a valid name: loading it raises the error
        return None
    if file is None:
        return None

    try:
        base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(cannot_load("adapter", model_name, error)) from error

    if not base or not isinstance(base, str):
        raise ModelError(
            f"the adapter {model_name!r} does not name its base model: set base_model_name_or_path in its "
            f"adapter_config.json"
        )
    # transformers would take a folder that was moved for a hub id, and report that there is no such model.
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ModelError(
            f"the adapter {model_name!r} was trained on {base!r}, which does not exist: restore that folder, or set "
            f"base_model_name_or_path in its adapter_config.json to the new path"
        )
    return base


def whole_checkpoint(model_name: str, *, local_files_only: bool = False) -> str:
    """Return the location of a model's config and whole weights; for an adapter, those of its base.

    Raises:
        ModelError: adapters are based on each other, or the base of one cannot be determined.
    """
    *_, base = checkpoint_chain(model_name, local_files_only=local_files_only)
    return base


def checkpoint_chain(model_name: str, *, local_files_only: bool = False) -> Iterator[str]:
    """Yield the locations of an adapter, the adapters under it and their base, in this order; of a model, its own.

    Raises:
        ModelError: adapters are based on each other, or the base of one cannot be determined.
    """
    passed: list[str] = []
    base: str | None = model_name
    while base is not None:
        location = place_of(base)
        if location in passed:
            raise ModelError(
                f"the adapter {location!r} is its own base model ({' -> '.join([*passed, location])}): set "
                f"base_model_name_or_path in its adapter_config.json to the model that it was trained on"
            )
        passed.append(location)
        yield location
        base = adapter_base(location, local_files_only=local_files_only)


def load_model_config(
    model_name: str, *, trust_remote_code: bool = False, local_files_only: bool = False
) -> PretrainedConfig:
    """Return the config of a language model or of an adapter's base; `local_files_only` does not query the hub.

    Raises:
        ModelError: no config can be loaded under that name, or adapters are based on each other.
    """
    name = whole_checkpoint(model_name, local_files_only=local_files_only)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=local_files_only)
    except Exception as error:
        raise ModelError(cannot_load("config of the model", model_name, error)) from error


def auto_class_of(config: PretrainedConfig) -> Any:
    """Return the transformers class that loads a language model of this family, as a model of texts if there is one."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if reads_images_only(config) else AutoModelForCausalLM


def reads_images_only(config: PretrainedConfig) -> bool:
    """Return whether a family is loaded as a vision-language model only, and not as one of texts."""
    is_vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return is_vision and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def is_loaded_by(config: PretrainedConfig, auto_class: Any) -> bool:
    """Return whether a transformers class loads the models of a family."""
    if auto_class is AutoModelForImageTextToText:
        return not config.is_encoder_decoder and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return auto_class_of(config) is auto_class


def dropout_rates(config: PretrainedConfig) -> dict[str, float]:
    """Return the dropout rates of a config by name; nested configs give names such as `text_config.dropout`."""
    rates: dict[str, float] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            rates |= {f"{name}.{nested}": rate for nested, rate in dropout_rates(value).items()}

        # `dropout`, `attn_pdrop`, `decoder_layerdrop` ...; a flag of the same name is no rate.
        elif isinstance(value, float) and ("dropout" in name or "pdrop" in name or "layerdrop" in name):
            rates[name] = value
    return rates


def set_dropout_rates(config: PretrainedConfig, rates: Mapping[str, float]) -> None:
    """Set dropout rates of a config in place, by the names that `dropout_rates` returns."""
    for name, rate in rates.items():
        *parents, field = name.split(".")
        setattr(reduce(getattr, parents, config), field, rate)


def without_output_layer(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the language-model head by an identity, in place: a critic needs hidden states only."""
    # Its name and place differ from family to family, so it is found by identity.
    head = model.get_output_embeddings()
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is head:
                setattr(parent, name, nn.Identity())
                return model
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enable activation checkpointing; transformers renamed the method in 5.23."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _tokenizer_location(model_name: str, *, local_files_only: bool) -> str:
    """Return the location of a model's tokenizer; for an adapter saved without one, that of its base."""
    # Bases are read only as far as needed: an adapter with a tokenizer has one even if its base is gone.
    for location in checkpoint_chain(model_name, local_files_only=local_files_only):
        if (Path(location) / "tokenizer_config.json").is_file():
            break
    return location


class Networks(NamedTuple):
    """Language models of an actor-critic; `dropout_rates` are those of the policy's checkpoint."""

    policy: PreTrainedModel
    critic: PreTrainedModel | None
    reference: PreTrainedModel | None
    dropout_rates: dict[str, float]


def load_networks(auto_class: Any, arguments: PolicyArguments, *, use_reference: bool, split: bool = False) -> Networks:
    """Load the networks of a policy.

    Args:
        auto_class: transformers' `AutoModelFor...`.
        arguments: those of the policy.
        use_reference: load a reference model.
        split: they are split over processes, each of which then reads its part where that is possible.

    Raises:
        ModelError: a checkpoint cannot be loaded, or is not valid for its role.
        MissingExtraError: PEFT is needed and not installed.
    """
    if arguments.critic_model is not None and arguments.critic != "separate":
        raise ModelError("critic_model requires critic: separate")

    # Frozen before it is copied: copies share frozen weights, so that with adapters there is one base in memory.
    unread = split and not needs_values(arguments.peft)
    policy, dropout_rates = _load(auto_class, arguments.model_name, arguments, unread=unread)
    train_vision = arguments.trained_vision
    freeze_vision(policy, train_vision)
    if arguments.peft is not None:
        policy.requires_grad_(False)

    def load_or_copy(model_name: str | None, role: str, unused: Unused | None = None) -> PreTrainedModel:
        """Return a network from another checkpoint, or a copy of the policy."""
        if model_name in (None, arguments.model_name):
            return copy_sharing_frozen(policy)
        other = _load(auto_class, str(model_name), arguments, role=role, unused=unused, unread=unread)[0]
        freeze_vision(other, train_vision)
        return other

    # A critic without an output layer in its checkpoint is complete: that layer is removed below.
    critic = None
    if arguments.critic == "separate":
        critic = load_or_copy(arguments.critic_model, "critic", output_layer)
    reference = None
    if use_reference:
        role = "reference" if arguments.teacher_model is None else "teacher"
        reference = load_or_copy(arguments.kl_model, role).requires_grad_(False)
        if arguments.reference_dtype == "bfloat16":
            store_in_bfloat16(reference)

    # Adapters come after the copies: policy and critic have their own, the reference has none.
    trained = [policy] if critic is None else [policy, critic]
    if arguments.peft is not None:
        refuse_unknown_layers(trained, arguments.peft)
        for model in trained:
            add_lora(model, within_scope(model, arguments.peft, train_vision), dropout=arguments.dropout)
        if not arguments.merge_on_save:
            require_stackable(policy)
    if arguments.gradient_checkpointing:
        for model in trained:
            checkpoint_activations(model)
    if critic is not None:
        critic = without_output_layer(critic)
    return Networks(policy, critic, reference, dropout_rates)


def _load(
    auto_class: Any, model_name: str, arguments: PolicyArguments, **options: Any
) -> tuple[PreTrainedModel, dict[str, float]]:
    return load_model(
        auto_class,
        model_name,
        dropout=arguments.dropout,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
        quantization=arguments.quantization,
        **options,
    )


def save_language_model(
    model: PreTrainedModel,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    checkpoint_dropout: Mapping[str, float],
    merge: bool = False,
    eos_token_ids: Collection[int] = (),
) -> Path:
    """Save a language model; of a model with adapters only these, so loading also needs the base.

    Args:
        model: with or without adapters; not changed.
        folder: target folder.
        tokenizer: saved in the same folder.
        checkpoint_dropout: dropout rates to save in the config of a whole model.
        merge: merge the adapters and save a whole model.
        eos_token_ids: tokens that end a response, saved in the generation config; default: those of the checkpoint.

    Returns:
        The folder.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    with _end_tokens_in_generation_config(model, eos_token_ids):
        if has_lora(model) and not merge:
            save_adapters(model, folder)
        else:
            save_whole(model, folder, checkpoint_dropout)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_value_head(head: nn.Linear, folder: Path) -> None:
    """Save a critic's head next to its network."""
    save_file({"weight": whole(head.weight.detach()).contiguous()}, folder / VALUE_HEAD)


def load_value_head(head: nn.Linear, critic_model: str) -> None:
    """Load the head of a critic that `save_critic` saved; a model without one leaves it unchanged.

    Raises:
        ModelError: the file cannot be read, or belongs to a network of another size.
    """
    # Only a critic that `save_critic` saved has such a file; any other model gives the network alone.
    file = cached_file(place_of(critic_model), VALUE_HEAD, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return
    try:
        weight = load_file(file)["weight"]
    except (SafetensorError, KeyError, OSError) as error:
        raise ModelError(f"cannot load the value head {file}: {error}") from error

    if weight.shape != head.weight.shape:
        raise ModelError(f"{file} is a value head for {weight.shape[-1]} features, not {head.in_features}")
    with torch.no_grad():
        head.weight.copy_(weight)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the regular expressions.

    Raises:
        ModelError: a pattern matches no parameter.
    """
    # A pattern with a typing error would freeze nothing, silently.
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ModelError(
                f"critic_frozen: {pattern!r} matches no parameter of the critic; it has {', '.join(names)}"
            )

    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)


@contextmanager
def _end_tokens_in_generation_config(model: PreTrainedModel, eos_token_ids: Collection[int]) -> Iterator[None]:
    """Set the end tokens of a model's generation config within the context, unless there are none."""
    # Without a language model's head there is no generation config.
    if not eos_token_ids or not model.can_generate():
        yield
        return

    # transformers writes a single token as a number. Its order of several has no meaning.
    end_tokens = sorted(eos_token_ids)
    config: Any = model.generation_config
    before = config.eos_token_id
    try:
        config.eos_token_id = end_tokens[0] if len(end_tokens) == 1 else end_tokens
        yield
    finally:
        config.eos_token_id = before


def save_whole(
    model: PreTrainedModel, folder: Path, checkpoint_dropout: Mapping[str, float], *, tied: bool = False
) -> None:
    """Save a model, with its adapters merged, in the files that `save_pretrained` writes of the plain model.

    Args:
        model: not changed.
        folder: target folder.
        checkpoint_dropout: dropout rates of its checkpoint, which the config gets, not those that it is trained with.
        tied: write tied weights under each of their names.
    """
    rates = dropout_rates(model.config)
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)
    try:
        set_dropout_rates(model.config, checkpoint_dropout)
        model._hf_peft_config_loaded = False  # transformers would save the adapters
        with with_saved_setting(model):
            model.save_pretrained(folder, state_dict={})  # all files but the weights
    finally:
        set_dropout_rates(model.config, rates)
        model._hf_peft_config_loaded = has_adapters
    write_full_weights(model, folder, tied=tied)
