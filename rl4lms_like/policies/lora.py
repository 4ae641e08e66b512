"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685), implemented with PEFT.

    base weights   frozen; one copy in memory
    policy         base + adapters          trained
    critic         base + its own adapters  trained, below its value head
    reference      base                     without adapters

Each network is a separate module tree, and all trees share the frozen tensors. Adapters are never switched on and off
between forward passes, which would break gradient checkpointing.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from rl4lms_like.core.model_weights import place_of
from rl4lms_like.policies.arguments import LoraArguments
from rl4lms_like.policies.quantization import KEY as QUANTIZATION
from rl4lms_like.policies.quantization import checked_quantization
from rl4lms_like.policies.quantized_layers import QuantizedLinear, dequantize, plain_layer, quantization_of, quantize
from rl4lms_like.policies.sharding import is_split, whole
from rl4lms_like.policies.stacked import (
    ROWS,
    EarlierAdapters,
    earlier_adapters,
    last_adapter,
    layer_changes,
    remember_adapter,
    row_changes,
    stacked,
    stacking_obstacle,
)
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ConfigIssue, ModelError, import_extra
from rl4lms_like.system.tensor_file import TensorFile

NAME = "default"
"""PEFT's default adapter name."""
ADAPTER_FILE = "adapter_model.safetensors"
"""PEFT's name of the file with the weights."""
_TASKS = {False: "CAUSAL_LM", True: "SEQ_2_SEQ_LM"}
"""PEFT's name of the task, by `is_encoder_decoder`."""


def lora_config(peft: Mapping[str, Any], *, dropout: bool, is_encoder_decoder: bool) -> Any:
    """Return PEFT's `LoraConfig` for `policy.args.peft`.

    Args:
        peft: fields of `LoraArguments`.
        dropout: keep its `lora_dropout`; otherwise it is set to 0.
        is_encoder_decoder: True for seq2seq models.

    Raises:
        MissingExtraError: PEFT is not installed.
        ValueError: fields are incompatible; PEFT's message names them.
    """
    fields = LoraArguments(**peft).fields()
    if not dropout:
        fields["lora_dropout"] = 0.0

    # The task decides nothing in training; PEFT's loader chooses the class of its wrapper by it.
    return _library().LoraConfig(**fields, task_type=_TASKS[is_encoder_decoder])


def lora_conflicts(peft: Mapping[str, Any] | None, path: str) -> list[ConfigIssue]:
    """Return the errors that PEFT finds in an otherwise valid block.

    Raises:
        MissingExtraError: PEFT is not installed.
    """
    if peft is None:
        return []
    try:
        lora_config(peft, dropout=True, is_encoder_decoder=False)
    except ValueError as error:
        return [ConfigIssue(path, str(error).strip())]
    return []


def add_lora(model: PreTrainedModel, peft: Mapping[str, Any], *, dropout: bool, empty: bool = False) -> None:
    """Freeze a model and add trainable adapters, in place; its outputs are unchanged at first.

    The adapters are initialized with torch's global generator. The model remains a `PreTrainedModel`.

    Args:
        model: a language model.
        peft: fields of `LoraArguments`.
        dropout: keep `lora_dropout`.
        empty: create adapters without values, on torch's `meta` device.

    Raises:
        MissingExtraError: PEFT is not installed.
        ModelError: `peft` does not fit the model.
    """
    config = lora_config(peft, dropout=dropout, is_encoder_decoder=bool(model.config.is_encoder_decoder))
    name = str(model.name_or_path)
    layers_by_weight: list[list[str]] = []
    if config.trainable_token_indices:
        rows = sorted(set(config.trainable_token_indices))
        layers_by_weight = _layers_with_rows(model, rows)
        config.trainable_token_indices = {layer: rows for layer in layers_by_weight[0]}

        # The config of every T5 says that its weights are tied, also if the output layer has its own. PEFT then ties
        # the rows of all layers, unless they have other lists of rows: another order is enough.
        for layer in layers_by_weight[1:]:
            is_tied = getattr(model.config, "tie_word_embeddings", False)
            config.trainable_token_indices |= dict.fromkeys(layer, rows[::-1] if is_tied else rows)

    # Into the model itself, not by `get_peft_model`: its wrapper is no `PreTrainedModel`.
    with _quietly():
        try:
            _library().inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=empty)
        except (ValueError, TypeError) as error:
            # PEFT knows default layers for some families only.
            hint = "; set peft.target_modules, for example to all-linear" if not peft.get("target_modules") else ""
            raise ModelError(f"peft does not fit the model {name!r}: {str(error).rstrip('.')}{hint}") from error

    model._hf_peft_config_loaded = True  # makes transformers treat it as a model with adapters
    config.base_model_name_or_path = _lasting(name)
    _share_rows(model, layers_by_weight)
    _refuse_tied(model)


def needs_values(peft: Mapping[str, Any] | None) -> bool:
    """Return whether new adapters are computed from the weights of the base; others need their shapes only."""
    return peft is not None and bool(peft.get("use_dora") or peft.get("trainable_token_indices"))


def _layers_with_rows(model: PreTrainedModel, rows: Sequence[int]) -> list[list[str]]:
    """Return the names of the layers in which a row belongs to a token, grouped by the weight that they share.

    Raises:
        ModelError: these rows cannot be trained.
    """
    name = repr(str(model.name_or_path))
    output: Any = model.get_output_embeddings()
    if getattr(output, "bias", None) is not None:
        raise ModelError(
            f"the output layer of {name} has a bias, without which PEFT would compute it if rows of it are trained: "
            f"remove peft to train all weights, or do not name tokens (tokenizer.add_tokens, chat_template: chatml, "
            f"peft.trainable_token_indices)"
        )

    inputs: Any = model.get_input_embeddings()
    n_tokens = len(inputs.weight)
    if rows[-1] >= n_tokens:
        raise ModelError(f"peft.trainable_token_indices: {rows[-1]} is no id of the {n_tokens} tokens of {name}")

    # Of a model with tied weights, PEFT finds the other layers itself, also when a saved adapter is loaded.
    names = {id(module): name for name, module in model.named_modules()}
    is_tied = output is None or output.weight is inputs.weight
    says_tied = getattr(model.config, "tie_word_embeddings", False)
    if is_tied and says_tied:
        return [[names[id(inputs)]]]
    if not is_tied and says_tied and len(rows) == 1:
        raise ModelError(
            f"PEFT cannot train a single row of {name}, whose output layer is not tied although its config says so: "
            f"name several tokens, or remove peft to train all weights"
        )

    # Otherwise all are named: the encoder and the decoder may have one weight, and the output layer another.
    weights = [inputs.weight]
    if not is_tied:
        weights.append(output.weight)
    groups = []
    for weight in weights:
        groups.append([name for name, module in model.named_modules() if getattr(module, "weight", None) is weight])
    return groups


def _share_rows(model: PreTrainedModel, layers_by_weight: Sequence[Sequence[str]]) -> None:
    """Let layers that share a weight have the same trained rows, in place."""
    for first, *others in layers_by_weight:
        layer: Any = model.get_submodule(first)
        rows = layer.token_adapter.trainable_tokens_delta[NAME]
        for other in others:
            layer = model.get_submodule(other)
            layer.token_adapter.trainable_tokens_delta[NAME] = rows


def refuse_unknown_layers(models: Sequence[PreTrainedModel], peft: Mapping[str, Any]) -> None:
    """Raise unless each layer name in `peft` matches a layer of one of the models.

    PEFT ignores unknown names as long as one name matches.

    Raises:
        ModelError: a name matches no layer.
    """
    layers: list[str] = []
    for model in models:
        layers += [name for name, _ in model.named_modules()]

    # As PEFT compares them: with a whole name, or with its end after a dot.
    for field, name, pattern in _layer_patterns(peft):
        if any(re.fullmatch(rf"(.*\.)?({pattern})", layer) for layer in layers):
            continue
        near = difflib.get_close_matches(name, {layer.rpartition(".")[2] for layer in layers}, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; its layers: {', '.join(_linear_layers(models))}"
        models_named = " or ".join(dict.fromkeys(repr(str(model.name_or_path)) for model in models))
        raise ModelError(f"peft.{field}: {name!r} is not a layer of {models_named}{hint}")


def _layer_patterns(peft: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the names of layers in `peft`: field, name, and the regular expression that it stands for."""
    patterns: list[tuple[str, str, str]] = []
    for field in ("target_modules", "exclude_modules"):
        names = peft.get(field)
        if isinstance(names, list):  # a text is a regular expression, or `all-linear`
            patterns += [(field, name, re.escape(name)) for name in names]

    # The keys of the mappings are regular expressions themselves.
    for field in ("rank_pattern", "alpha_pattern"):
        patterns += [(field, name, name) for name in peft.get(field) or ()]
    return patterns


def _linear_layers(models: Sequence[nn.Module]) -> list[str]:
    """Return the last parts of the names of all layers with a weight matrix, except embeddings."""
    names = set()
    for model in models:
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            is_matrix = getattr(weight, "ndim", 0) == 2
            if name and is_matrix and not isinstance(module, nn.Embedding):
                names.add(name.rpartition(".")[2])
    return sorted(names)


def copy_sharing_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a module tree with its trainable weights; the frozen weights are shared with the original."""
    # `deepcopy` takes what the memo has under a tensor's id for its copy.
    shared = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return copy.deepcopy(model, shared)


def has_lora(model: PreTrainedModel) -> bool:
    """Return True if the model has adapters."""
    return next(_adapted(model), None) is not None


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return an equivalent model without adapters.

    Adapters are added to copies of their weights; all other weights are shared. Quantized layers become plain ones in
    float32 with the weights that they compute with.

    Args:
        model: a model with adapters; not changed.
    """
    plain = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    rows: dict[int, nn.Parameter] = {}  # by the id of the frozen weight
    for name, layer in list(changed_layers(plain)):
        base = merged_layer(layer)
        if trains_rows(layer):
            # Tied weights stay tied.
            frozen = id(layer.token_adapter.base_layer.weight)
            base.weight = rows.setdefault(frozen, base.weight)
        parent, _, child = name.rpartition(".")
        setattr(plain.get_submodule(parent), child, base)

    # Also in layers that PEFT does not wrap because no forward pass uses them, such as Marian's `shared`.
    for module in plain.modules():
        weight = rows.get(id(module._parameters.get("weight")))
        if weight is not None:
            module.weight = weight

    # Quantized layers without adapters.
    dequantize(plain)

    # transformers no longer takes it for a model with adapters.
    plain._hf_peft_config_loaded = False
    del plain.peft_config
    return plain


def changed_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have adapters or trained rows, with their names.

    Several weights of one module, as experts have, are adapted by nested layers: only the outermost is returned.
    """
    for name, layer in (*_adapted(model), *_with_rows(model)):
        if not name.endswith(".base_layer"):
            yield name, layer


def trains_rows(layer: Any) -> bool:
    """Return whether rows of a layer of `changed_layers` are trained, not an adapter."""
    return hasattr(layer, "token_adapter")


def changed_weights(layer: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the weights of the base that the adapters or trained rows of a layer change, with their names in it."""
    if trains_rows(layer):
        return [("weight", layer.token_adapter.base_layer.weight)]
    base = layer.get_base_layer()
    names = [_weight_name(wrapper) for wrapper in _wrappers(layer)]
    return [(name, getattr(base, name)) for name in names]


@torch.no_grad()
def merged_layer(layer: Any) -> Any:
    """Return the plain module of a layer of `changed_layers`, with its adapters or trained rows in copies of weights.

    Weights are whole, also if those of the layer are split; the weights that are not changed are shared otherwise. A
    quantized layer, with an adapter or without, becomes one in float32.
    """
    weights: dict[int, Any] = {}
    for weight in layer.parameters():
        is_whole = not is_split(weight)
        weights[id(weight)] = weight if is_whole else nn.Parameter(whole(weight.detach()), requires_grad=False)
    plain = copy.deepcopy(layer, weights)
    if isinstance(plain, QuantizedLinear):
        return plain_layer(plain)
    if trains_rows(layer):
        base = plain.token_adapter.base_layer
        base.weight = nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
        return base

    base = plain.get_base_layer()
    if isinstance(base, QuantizedLinear):
        return plain_layer(base, plain.get_delta_weight(NAME))

    # `merge` adds to the base weight in place, which may still be that of `layer`: hence the clone.
    for wrapper in _wrappers(plain):
        name = _weight_name(wrapper)
        setattr(base, name, nn.Parameter(getattr(base, name).detach().clone(), requires_grad=False))
        wrapper.merge()
    return base


def _wrappers(layer: Any) -> list[Any]:
    """Return a layer with an adapter and those with adapters within it, from the outermost."""
    wrappers = []
    while hasattr(layer, "get_base_layer"):
        wrappers.append(layer)
        layer = layer.base_layer
    return wrappers


def require_stackable(model: PreTrainedModel) -> None:
    """Raise if the adapters of a model could not be saved together with those that are merged into its weights.

    Raises:
        ModelError: one of them is of a kind that cannot be part of another adapter.
    """
    if obstacle := _obstacle(model):
        raise ModelError(
            f"new adapters on the adapter {model.name_or_path!r} cannot be saved as one adapter: {obstacle}. Set "
            f"merge_on_save: true, which saves a whole model"
        )


def _obstacle(model: PreTrainedModel) -> str:
    """Return why the adapters of a model cannot be stacked on those merged into its weights; empty if they can."""
    earlier = earlier_adapters(model)
    if earlier is None:
        return ""
    if quantization_of(model) is not None:
        return "the base was quantized after the earlier ones had been merged into it"
    names = _library().get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return earlier.obstacle or stacking_obstacle(model.peft_config[NAME], names)


def save_adapters(model: PreTrainedModel, folder: str | Path) -> None:
    """Save `adapter_config.json` and `adapter_model.safetensors`, as PEFT reads them, and the generation config.

    Adapters that were merged into the model when it was loaded become part of the saved one (`policies.stacked`). No
    `config.json` is saved: with it, transformers would also look for the whole weights in this folder. How the base was
    quantized is in the metadata of the weights, see `merge_adapter_folder`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = copy.copy(model.peft_config[NAME])

    if earlier_adapters(model) is not None and not _obstacle(model):
        weights, fields = stacked(model, NAME)
        for name, value in fields.items():
            setattr(config, name, value)
    else:
        # The prefix is that of PEFT's wrapper around a model, which its loader expects.
        saved = _library().get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
        if config.trainable_token_indices:  # a critic has no output layer
            has_rows = [name for name in config.trainable_token_indices if f"{name}.{ROWS}" in saved]
            config.trainable_token_indices = {name: config.trainable_token_indices[name] for name in has_rows}
        weights = {}
        for name, weight in saved.items():
            # PEFT leaves this end out; it reads both names, transformers only the longer one.
            end = ".weight" if name.endswith("lora_magnitude_vector") else ""
            # Layers that share trained rows have them once each in a file, which cannot have one tensor twice.
            weights[f"base_model.model.{name}{end}"] = whole(weight.detach()).clone().contiguous()
    metadata = {"format": "pt"}
    if (quantization := quantization_of(model)) is not None:
        metadata[QUANTIZATION] = json.dumps(quantization)
    # Not by `save_file`, which writes several texts of the metadata in a random order.
    with TensorFile(folder / ADAPTER_FILE, weights, metadata) as file:
        for name, tensor in weights.items():
            file.write(name, tensor)

    # A set's order differs from process to process, and files of equal runs should be equal.
    for name in ("target_modules", "exclude_modules", "target_parameters"):
        names = getattr(config, name)
        if isinstance(names, set):
            setattr(config, name, sorted(names))
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def load_adapters(model: PreTrainedModel, file: str | Path) -> None:
    """Load the adapters that a model trains from a file of `save_adapters`, in place.

    Args:
        model: a model with adapters, loaded and extended as the one that was saved.
        file: `adapter_model.safetensors`.

    Raises:
        ModelError: the file has weights that the model lacks, or lacks some of its adapters.
    """
    weights = {name.removeprefix("base_model.model."): weight for name, weight in load_file(file).items()}
    config: Any = model.peft_config[NAME]
    weights = last_adapter(model, weights, NAME, uses_dora=config.use_dora)
    result: Any = _library().set_peft_model_state_dict(model, weights, adapter_name=NAME)

    # The file lacks the base, and all but one of the names of tied rows of tokens.
    missing = [name for name in result.missing_keys if "lora_" in name and f".{NAME}" in name]
    wrong = sorted(missing + result.unexpected_keys)
    if wrong:
        raise ModelError(f"the adapters in {file} do not match this model: {', '.join(wrong[:3])}")


def merge_adapter_folder(base: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Return a base model with a saved adapter merged into its weights; all of them are trainable again.

    What the adapter changed is recorded in the model: see `policies.stacked`. An adapter that this library trained on a
    quantized base is merged into the weights of that base, dequantized: only with these it is the trained model.

    Args:
        base: the model that the adapter was trained on; changed by the merge.
        folder: folder with `adapter_config.json` and the adapter's weights, or a hub id.

    Raises:
        MissingExtraError: PEFT is not installed, or the package that quantized the base.
        ModelError: the adapter does not fit the base, or cannot be merged.
    """
    peft = _library()
    trained = {name for name, weight in base.named_parameters() if weight.requires_grad}
    quantization = saved_quantization(folder)
    if quantization is not None:
        quantize(base, quantization)
        dequantize(base)
    says_tied = getattr(base.config, "tie_word_embeddings", False)

    # PEFT only warns of weights that the folder lacks, and would leave them as they were initialized.
    with _quietly():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            # The task selects PEFT's class for a language model, which could not wrap a reward model.
            config = peft.PeftConfig.from_pretrained(folder)
            if config.task_type in _TASKS.values():
                config.task_type = None
            adapted = peft.PeftModel.from_pretrained(base, folder, config=config)
            names = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
            obstacle = stacking_obstacle(adapted.peft_config[NAME], names)
            if quantization is not None:
                obstacle = "it was trained on a quantized base"
            changes = {} if obstacle else layer_changes(base, NAME)
            rows = {} if obstacle else row_changes(base, NAME)
            model: PreTrainedModel = adapted.merge_and_unload()
        except (ValueError, RuntimeError, KeyError, AttributeError, UserWarning) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"the adapter {folder!r} cannot be merged into its base {base.name_or_path!r}: {reason}"
            ) from error

    # Its low-rank matrices are still needed when new adapters are saved.
    remember_adapter(model, EarlierAdapters(_lasting(str(base.name_or_path)), changes, rows, obstacle))

    # PEFT froze all weights, and corrects the config of a T5 with an output layer of its own, by which the next adapter
    # is built. The name is that of the adapter, which messages and the next adapter's config show.
    model.config.tie_word_embeddings = says_tied
    model.name_or_path = folder
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)
    return model


def saved_quantization(folder: str) -> dict[str, Any] | None:
    """Return how the base of a saved adapter was quantized in its training; None if it was not.

    Args:
        folder: folder with the adapter's weights, or a hub id.

    Raises:
        ModelError: the file cannot be read, or names a quantization that this version does not have.
    """
    # Adapters of other programs may have other files.
    file = cached_file(place_of(folder), ADAPTER_FILE, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    try:
        with safe_open(file, "pt") as weights:
            saved = (weights.metadata() or {}).get(QUANTIZATION)
        return None if saved is None else checked_quantization(json.loads(saved))
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"cannot read how the base of the adapter {folder!r} was quantized: {error}") from error


def _library() -> Any:
    return import_extra("peft", extra="peft", needed_by="LoRA (policy.args.peft, or a model that is an adapter)")


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence PEFT's warnings about cases that are handled here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # PEFT corrects it
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # see _refuse_tied
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")  # of T5, see above
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not")  # checked here
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # caused by PEFT
        yield


def _adapted(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have a low-rank adapter, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "get_base_layer") and not hasattr(module, "trainable_tokens_delta"):
            yield name, module


def _with_rows(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have trained rows, with their names."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "token_adapter"))


def _weight_name(layer: Any) -> str:
    """Return the name of the weight that an adapter changes, in the module that has it."""
    # The experts of a layer are one module with several weights `[n_experts, out, in]`, of which PEFT adapts each.
    return getattr(layer, "parameter_name", "weight")


def _refuse_tied(model: PreTrainedModel) -> None:
    """Raise if a weight with an adapter is tied to another layer, because it could not be merged."""
    # Tied weights are one tensor under several names.
    layers_of_weight: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        layers_of_weight.setdefault(id(weight), []).append(name.removesuffix(".weight"))

    for name, layer in _adapted(model):
        layers = layers_of_weight[id(getattr(layer.get_base_layer(), _weight_name(layer)))]
        others = [other for other in layers if not other.startswith(f"{name}.base_layer")]
        if others:
            raise ModelError(
                f"peft adds an adapter to {name!r}, whose weights are tied to {others[0]!r}: the adapter could not be "
                f"merged. Remove it from target_modules, or add it to exclude_modules"
            )


def _lasting(model_name: str) -> str:
    """Return a name that is independent of the working directory."""
    folder = with_home(model_name)
    return str(folder.resolve()) if folder.is_dir() else model_name
