"""Saving of language models: whole, for `AutoModel*.from_pretrained`, or adapters only, for PEFT.

whole      config.json  model.safetensors  generation_config.json             tokenizer
adapters   adapter_config.json  adapter_model.safetensors  generation_config.json   tokenizer
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl4lms_like.policies.loading import dropout_rates, set_dropout_rates
from rl4lms_like.policies.lora import has_lora, merged, save_adapters


def save_language_model(
    model: PreTrainedModel,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    checkpoint_dropout: Mapping[str, float],
    merge: bool = False,
) -> Path:
    """Save a language model; of a model with adapters only these, so loading also needs the base.

    Args:
        model: with or without adapters; not changed.
        folder: target folder.
        tokenizer: saved in the same folder.
        checkpoint_dropout: dropout rates to save in the config of a whole model.
        merge: merge the adapters and save a whole model.

    Returns:
        The folder.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    try:
        if has_lora(model) and not merge:
            save_adapters(model, folder)
        else:
            _save_whole(merged(model) if has_lora(model) else model, folder, checkpoint_dropout)
    except SafetensorError as error:  # raised by safetensors if the disk is full
        raise OSError(str(error)) from error
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _save_whole(model: PreTrainedModel, folder: Path, checkpoint_dropout: Mapping[str, float]) -> None:
    rates = dropout_rates(model.config)
    try:
        set_dropout_rates(model.config, checkpoint_dropout)
        model.save_pretrained(folder, safe_serialization=True)
    finally:
        set_dropout_rates(model.config, rates)
