"""Models and tokenizers from a hub id or a local folder, with errors that say which one and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl4lms_like.core.errors import ModelError


def load_tokenizer(
    model_name: str,
    *,
    pad_token_as_eos_token: bool = True,
    padding_side: str = "left",
    truncation_side: str = "left",
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """A tokenizer, with a pad token if `pad_token_as_eos_token` and it has none.

    Raises:
        ModelError: it cannot be loaded, or there is no token to pad with.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_name,
            padding_side=padding_side,
            truncation_side=truncation_side,
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:
        raise ModelError(_cannot_load("tokenizer", model_name, error)) from error
    if tokenizer.pad_token is None and pad_token_as_eos_token:
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokenizer of {model_name!r} has neither a pad token nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    auto_class: Any,
    model_name: str,
    *,
    dropout: bool = False,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, dict[str, float]]:
    """A language model in float32, and the dropout rates of its checkpoint.

    Args:
        auto_class: transformers' `AutoModelFor...`.
        model_name: hub id or local folder.
        dropout: keep the rates of the model's config; otherwise all of them are set to 0.
        attn_implementation: transformers' argument; None leaves the choice to it.
        trust_remote_code: run code that the model brings along.

    Raises:
        ModelError: it cannot be loaded.
    """
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code)
        rates = dict(dropout_rates(config))
        if not dropout:
            for name in rates:
                setattr(config, name, 0.0)
        model: PreTrainedModel = auto_class.from_pretrained(
            model_name, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code, **options
        )
    except Exception as error:
        raise ModelError(_cannot_load("model", model_name, error)) from error
    return model, rates


def auto_class_of(config: PretrainedConfig) -> Any:
    """The transformers class that loads a language model of this family."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def dropout_rates(config: PretrainedConfig) -> list[tuple[str, float]]:
    """The fields of a model's config that are dropout rates, with their values."""
    names = [name for name in vars(config) if "dropout" in name or "pdrop" in name or "layerdrop" in name]
    return [(name, getattr(config, name)) for name in names if isinstance(getattr(config, name), float)]


def without_output_layer(model: PreTrainedModel) -> PreTrainedModel:
    """Takes the language-model head off, in place: a critic needs hidden states only."""
    head = model.get_output_embeddings()
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is head:
                setattr(parent, name, nn.Identity())
                return model
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recomputes activations in the backward pass; transformers renamed the call in 5.23."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _cannot_load(what: str, model_name: str, error: Exception) -> str:
    place = Path(model_name).expanduser()
    if place.is_dir():
        found = ", ".join(sorted(path.name for path in place.iterdir())[:8]) or "nothing"
        hint = f"the folder holds: {found}"
    elif place.is_absolute() or model_name.startswith((".", "~")):
        hint = "there is no such folder"
    else:
        hint = "neither a local folder nor a model that the hub or its cache could give"
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"cannot load the {what} {model_name!r} ({hint}): {type(error).__name__}: {reason}"
