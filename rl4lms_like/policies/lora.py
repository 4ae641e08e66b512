"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) in place of whole weights, by PEFT.

    base weights   frozen; one copy in memory
    policy         base + adapters          trained
    critic         base + its own adapters  trained, below its value head
    reference      base                     a module tree of its own, without adapters

Each network is a module tree of its own and the frozen tensors in all of them are the same: nothing is switched on and
off between forward passes, which recomputed activations would not survive.
"""

from __future__ import annotations

import copy
import difflib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import Mistake, ModelError, import_extra
from rl4lms_like.policies.lora_arguments import LoraArguments

NAME = "default"
"""PEFT's name of an adapter that has none."""


def lora_config(peft: Mapping[str, Any], *, dropout: bool, is_encoder_decoder: bool) -> Any:
    """PEFT's `LoraConfig` of `policy.args.peft`.

    Args:
        peft: fields of `LoraArguments`.
        dropout: keep its `lora_dropout`; otherwise it is 0.
        is_encoder_decoder: the model's family.

    Raises:
        MissingExtraError: PEFT is not installed.
        ValueError: fields that do not go together; PEFT says which.
    """
    fields = LoraArguments(**peft).fields()
    if not dropout:
        fields["lora_dropout"] = 0.0
    task = "SEQ_2_SEQ_LM" if is_encoder_decoder else "CAUSAL_LM"
    return _library().LoraConfig(**fields, task_type=task)


def lora_conflicts(peft: Mapping[str, Any] | None, path: str) -> list[Mistake]:
    """What only PEFT knows to be wrong with a block that has no mistakes of its own.

    Args:
        peft: fields of `LoraArguments`, or None.
        path: where in the config, `alg.policy.args.peft`.

    Raises:
        MissingExtraError: PEFT is not installed.
    """
    if peft is None:
        return []
    try:
        lora_config(peft, dropout=True, is_encoder_decoder=False)
    except ValueError as error:
        return [Mistake(path, str(error).strip())]
    return []


def add_lora(model: PreTrainedModel, peft: Mapping[str, Any], *, dropout: bool, empty: bool = False) -> None:
    """Freezes a model and gives it adapters to train, in place; what it computes stays the same for now.

    The adapters are drawn from torch's global generator. The model stays a `PreTrainedModel`.

    Args:
        model: a language model.
        peft: fields of `LoraArguments`.
        dropout: keep `lora_dropout`.
        empty: make adapters without values, on torch's `meta` device.

    Raises:
        MissingExtraError: PEFT is not installed.
        ModelError: `peft` does not fit the model.
    """
    config = lora_config(peft, dropout=dropout, is_encoder_decoder=bool(model.config.is_encoder_decoder))
    name = str(model.name_or_path)
    with _quietly():
        try:
            _library().inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=empty)
        except (ValueError, TypeError) as error:
            raise ModelError(f"peft does not fit the model {name!r}: {error}") from error
    model._hf_peft_config_loaded = True  # to transformers, too, it is a model with adapters now
    config.base_model_name_or_path = _lasting(name)
    _refuse_tied(model)


def refuse_unknown_layers(models: Sequence[PreTrainedModel], peft: Mapping[str, Any]) -> None:
    """PEFT passes over names that no layer has, as long as one name fits; here each must fit one of the models.

    Args:
        models: those that get adapters, without them still.
        peft: fields of `LoraArguments`.

    Raises:
        ModelError: names which layer is not there.
    """
    layers = [name for model in models for name, _ in model.named_modules()]
    asked = [
        (field, name, re.escape(name))
        for field in ("target_modules", "exclude_modules")
        if isinstance(peft.get(field), list)
        for name in peft[field]
    ]
    asked += [(field, name, name) for field in ("rank_pattern", "alpha_pattern") for name in peft.get(field) or ()]
    for field, name, pattern in asked:
        if not any(re.fullmatch(rf"(.*\.)?({pattern})", layer) for layer in layers):
            near = difflib.get_close_matches(name, {layer.rpartition(".")[2] for layer in layers}, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            places = " or ".join(dict.fromkeys(repr(str(model.name_or_path)) for model in models))
            raise ModelError(f"peft.{field}: {name!r} is no layer of {places}{hint}")


def copy_sharing_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """A module tree of its own over the very same frozen weights; what is trained is copied.

    Without frozen weights it is a whole copy.
    """
    shared = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return copy.deepcopy(model, shared)


def has_lora(model: PreTrainedModel) -> bool:
    """Whether the model has adapters."""
    return next(_adapted(model), None) is not None


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model that computes the same: adapters added to weights of its own, all other weights shared.

    Args:
        model: with adapters; it is left as it is.
    """
    plain = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for name, layer in list(_adapted(plain)):
        base = layer.get_base_layer()
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(plain.get_submodule(parent), child, base)
    plain._hf_peft_config_loaded = False
    del plain.peft_config
    return plain


def save_adapters(model: PreTrainedModel, folder: str | Path) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, as PEFT reads them, and the generation config.

    There is no `config.json`: with one, transformers would look for the whole weights in this folder too.

    Args:
        model: with adapters.
        folder: is made if it is not there.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = _library().get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    named = {f"base_model.model.{name}": weight.contiguous() for name, weight in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(model.peft_config[NAME])
    for name in ("target_modules", "exclude_modules"):
        if isinstance(names := getattr(config, name), set):  # whose order differs from process to process
            setattr(config, name, sorted(names))
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def merge_adapter_folder(base: PreTrainedModel, folder: str) -> PreTrainedModel:
    """A base model with a saved adapter added to its weights, all of them trainable again.

    Args:
        base: the model that the adapter was trained on; used up.
        folder: where `adapter_config.json` and the adapter's weights lie, or a hub id.

    Raises:
        MissingExtraError: PEFT is not installed.
        ModelError: the adapter does not fit the base, or is of a kind that cannot be merged.
    """
    peft = _library()
    trained = {name for name, weight in base.named_parameters() if weight.requires_grad}
    with _quietly():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = peft.PeftModel.from_pretrained(base, folder)
            model: PreTrainedModel = adapted.merge_and_unload()
        except (ValueError, RuntimeError, KeyError, AttributeError, UserWarning) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(
                f"the adapter {folder!r} cannot be merged into its base {base.name_or_path!r}: {reason}"
            ) from error
    model.name_or_path = folder
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)
    return model


def _library() -> Any:
    return import_extra("peft", extra="peft", needed_by="LoRA (policy.args.peft, or a model that is an adapter)")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what PEFT warns of although it is taken care of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # it finds out by itself
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # such adapters are refused
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not")  # so are these
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # its own question
        yield


def _adapted(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The layers that have an adapter, with their names."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "get_base_layer"))


def _refuse_tied(model: PreTrainedModel) -> None:
    """Weights that stand in two places cannot take up an adapter of one of them."""
    places: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(weight), []).append(name.removesuffix(".weight"))
    for name, layer in _adapted(model):
        others = [place for place in places[id(layer.get_base_layer().weight)] if place != f"{name}.base_layer"]
        if others:
            raise ModelError(
                f"peft reaches {name!r}, whose weights are those of {others[0]!r} too: its adapter could not be "
                f"merged. Take it out of target_modules, or name it in exclude_modules"
            )


def _lasting(model_name: str) -> str:
    """A name that means the same in another working directory."""
    folder = with_home(model_name)
    return str(folder.resolve()) if folder.is_dir() else model_name
