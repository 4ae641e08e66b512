"""The weights of a language model as the plain model of transformers has them: whole, with adapters merged into them.

    weights of a network (split, with adapters) ─ one transformer block after the other ─> names and whole tensors
                                                                                           ├─ files of a saved model
                                                                                           └─ an engine

There is never more than one block in memory besides the network's own weights. Split weights are gathered block by
block for every forward pass anyway; what is outside of blocks (embeddings, output layer) comes one tensor at a time.
Quantized weights are dequantized. Names and shapes are those of checkpoints: transformers has other ones in memory for
some families, such as one tensor for all experts of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from rl4lms_like.policies.lora import changed_layers, changed_weights, merged_layer
from rl4lms_like.policies.quantized_layers import QuantizedLinear, n_weights
from rl4lms_like.policies.sharding import named_blocks, whole
from rl4lms_like.system.tensor_file import TensorFile

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_FILE = "50GB"
"""Size from which weights are written to several files with an index, as in `save_pretrained`."""
_OF_ADAPTERS = ("lora_", "trainable_tokens_")
"""Beginnings of the names of PEFT's modules and parameters that a plain model does not have."""


@dataclass(frozen=True)
class _Weight:
    """Weight or buffer of the plain model.

    Args:
        name: in the plain model.
        tensor: of the network: perhaps split, without adapters. It has the shape of the whole. Of a quantized weight,
            a tensor on `meta`.
        layer: layer whose adapter or trained rows change the weight, or that is quantized; None if there is none.
        name_in_layer: name of the weight in the plain module of that layer.
    """

    name: str
    tensor: Tensor
    layer: Any = None
    name_in_layer: str = ""


def full_weights(model: PreTrainedModel, *, tied: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of all weights and saved buffers of a model, of one transformer block after the other.

    If its weights are split, all processes must do so together, or the main one within `led_by_main`.

    Args:
        model: with or without adapters; not changed. The tensors may be its own.
        tied: yield tied weights under each of their names; otherwise, once.
    """
    for block in _blocks(model, tied=tied):
        # By layer: a layer of experts has several changed weights, and is merged once.
        merged_layers: dict[Any, Any] = {}
        values: dict[str, Tensor] = {}
        for weight in block:
            if weight.layer is None:
                values[weight.name] = whole(weight.tensor.detach())
                continue
            if weight.layer not in merged_layers:
                merged_layers[weight.layer] = merged_layer(weight.layer)
            values[weight.name] = getattr(merged_layers[weight.layer], weight.name_in_layer).detach()

        yield from revert_weight_conversion(model, values).items()


def write_full_weights(model: PreTrainedModel, folder: Path, *, tied: bool) -> None:
    """Write what `full_weights` yields to a folder, in the files in which `save_pretrained` writes a plain model.

    Raises:
        OSError: a file cannot be written.
    """
    # Names, shapes and types are enough to arrange the files.
    shapes = _checkpoint_shapes(model, chain.from_iterable(_blocks(model, tied=tied)))
    pattern = FILE.replace(".safetensors", "{suffix}.safetensors")
    files = split_torch_state_dict_into_shards(shapes, filename_pattern=pattern, max_shard_size=LARGEST_FILE)

    with ExitStack() as stack:
        file_of: dict[str, TensorFile] = {}
        for name, tensor_names in files.filename_to_tensors.items():
            in_file = {tensor_name: shapes[tensor_name] for tensor_name in tensor_names}
            file = stack.enter_context(TensorFile(folder / name, in_file, {"format": "pt"}))
            file_of |= dict.fromkeys(tensor_names, file)
        for name, tensor in full_weights(model, tied=tied):
            file_of[name].write(name, tensor)

    if files.is_sharded:
        metadata = {"total_parameters": n_weights(model), **files.metadata}
        index = {"metadata": metadata, "weight_map": files.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _blocks(model: PreTrainedModel, *, tied: bool) -> list[list[_Weight]]:
    """Return the weights of the plain model, grouped by transformer blocks; each of the others is a group."""
    # By the id of the weight. A tied one is one tensor under several names, whose trained rows are those of each.
    layers: dict[int, tuple[Any, str]] = {}
    for _, layer in changed_layers(model):
        for name_in_layer, base in changed_weights(layer):
            layers[id(base)] = (layer, name_in_layer)

    # A quantized weight is stored as several tensors, the first of which stands for it.
    quantized: dict[int, tuple[QuantizedLinear, str]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            stored = [item for item in module.named_parameters(recurse=False) if item[0] != "bias"]
            quantized |= {id(tensor): (module, name) for name, tensor in stored}

    weights = []
    for name, tensor in _saved_tensors(model):
        parts = name.split(".")
        if any(part.startswith(_OF_ADAPTERS) for part in parts):
            continue
        plain_name = ".".join(part for part in parts if part not in ("base_layer", "token_adapter"))
        layer, name_in_layer = layers.get(id(tensor), (None, ""))
        if id(tensor) in quantized:
            module, stored_name = quantized[id(tensor)]
            if stored_name != "weight":
                continue
            if layer is None:
                layer, name_in_layer = module, "weight"
            tensor = torch.empty(module.plain_shape, device="meta")
        weights.append(_Weight(plain_name, tensor, layer, name_in_layer))

    ignored = set(model._keys_to_ignore_on_save or ())
    if not tied:
        # transformers decides which name it will look for. It compares memory: one number stands for each tensor.
        numbers = {id(weight.tensor): torch.zeros(1) for weight in weights}
        named = {weight.name: numbers[id(weight.tensor)] for weight in weights}
        ignored |= named.keys() - remove_tied_weights_from_state_dict(dict(named), model).keys()

    block_names = [name for name, _ in named_blocks(model)]
    blocks: dict[str, list[_Weight]] = {}
    for weight in weights:
        if weight.name not in ignored:
            block = next((name for name in block_names if weight.name.startswith(f"{name}.")), weight.name)
            blocks.setdefault(block, []).append(weight)

    # A tensor of a checkpoint may be computed from several in memory. These are in one block; should a family have some
    # in several blocks, only all weights together can be converted.
    groups = list(blocks.values())
    every = list(chain.from_iterable(groups))
    of_blocks: set[tuple[str, torch.Size]] = set()
    for group in groups:
        of_blocks |= {(name, shape.shape) for name, shape in _checkpoint_shapes(model, group).items()}
    of_model = {(name, shape.shape) for name, shape in _checkpoint_shapes(model, every).items()}
    return groups if of_blocks == of_model else [every]


def _checkpoint_shapes(model: PreTrainedModel, weights: Iterable[_Weight]) -> dict[str, Tensor]:
    """Return tensors without values, with the names, shapes and types that weights have in a checkpoint."""
    on_meta: dict[str, Tensor] = {}
    for weight in weights:
        on_meta[weight.name] = torch.empty(weight.tensor.shape, dtype=weight.tensor.dtype, device="meta")

    # A part of a tensor would count with the size of the whole tensor, hence the clones, which need no memory.
    return {name: shape.clone() for name, shape in revert_weight_conversion(model, on_meta).items()}


def _saved_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and persistent buffers, tied ones under each of their names.

    Not by `state_dict`, where torch would split weights again that are whole now.
    """
    for prefix, module in model.named_modules():
        tensors: list[tuple[str, Any]] = [*module._parameters.items()]
        tensors += [item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set]
        for name, tensor in tensors:
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), tensor
