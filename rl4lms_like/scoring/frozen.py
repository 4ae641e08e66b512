"""Models that score texts and are never trained: loaded at first use, shared, and pickled without their weights.

FrozenModel("owner/name", "AutoModelForSequenceClassification")     loads nothing; a missing folder is an error
    .loaded      model (evaluation mode, no gradients, on its device) and tokenizer, loaded at first use
    pickled      the name alone; the receiving process loads its own copy

Two frozen models of one checkpoint, for example a reward's and a metric's, share the weights while both are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from rl4lms_like.core.devices import Device, Dtype, existing_device
from rl4lms_like.core.model_weights import cannot_load, check_complete, load_complete, place_of, require_folder
from rl4lms_like.system.errors import ModelError
from rl4lms_like.system.numbers import Count

T = TypeVar("T")
_NO_LIMIT = 10**9  # larger values mean no limit: tokenizers without a limit report 1e30
_NOT_LOADED = ("role", "device", "batch_size", "max_length")
"""Settings that make no difference to what is loaded; the device is looked up."""

_ALIVE: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


@dataclass(eq=False, kw_only=True)
class ModelArguments:
    """Arguments of scores by a model.

    Args:
        batch_size: texts per forward pass.
        device: device of the model; `auto` uses a GPU if available.
        dtype: data type of its weights.
    """

    batch_size: Count = 32
    device: Device = "auto"
    dtype: Dtype = "float32"


@dataclass(frozen=True, eq=False)
class Loaded:
    """Model in evaluation mode and its tokenizer, which truncates long texts on the requested side."""

    model: Any
    tokenizer: Any


@dataclass(eq=False)
class FrozenModel:
    """Checkpoint that scores texts.

    Raises:
        ModelError: the name can only be a local folder, which does not exist, or the folder lacks weights.
        ValueError: there is no such device.
    """

    model_name: str  # hub id or local folder
    auto_class: str  # name of the transformers class that loads it
    _: KW_ONLY
    role: str = "model"  # purpose of the model, for error messages
    device: str = "auto"
    dtype: str = "float32"
    truncation_side: str = "left"  # side on which texts with too many tokens for the model are truncated
    trust_remote_code: bool = False  # run code that is part of the checkpoint

    def __post_init__(self) -> None:
        require_folder(self.role, self.model_name)
        existing_device(self.device)
        self._check_weights()

    @property
    def model(self) -> Any:
        """The model, loaded at first use."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded at first use."""
        return self.loaded.tokenizer

    @cached_property
    def loaded(self) -> Loaded:
        """Model and tokenizer; if they cannot be loaded, a `ModelError` names the checkpoint and the reason."""
        # All other settings, those of subclasses too, make a difference to what is loaded, so they are in the key.
        settings = tuple(value for name, value in sorted(vars(self).items()) if name not in _NOT_LOADED)
        return shared((*settings, existing_device(self.device), version_of(self.model_name)), self._load)

    def local_config(self) -> Any:
        """Return the config in a local folder, or raise a `ModelError`; None for a checkpoint of the hub."""
        location = place_of(self.model_name)
        if not Path(location).is_dir():
            return None

        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(location, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            raise ModelError(cannot_load(self.role, self.model_name, error)) from error

    def _check_weights(self) -> None:
        """Raise an error for a local folder that lacks weights, before any are read."""
        location = place_of(self.model_name)
        if not (Path(location) / "config.json").is_file():
            return

        import transformers

        check_complete(
            getattr(transformers, self.auto_class),
            location,
            role=self.role,
            model_name=self.model_name,
            trust_remote_code=self.trust_remote_code,
        )

    def _load(self) -> Loaded:
        import torch
        import transformers

        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                place_of(self.model_name),
                truncation_side=self.truncation_side,
                trust_remote_code=self.trust_remote_code,
            )
        except Exception as error:
            raise ModelError(cannot_load(self.role, self.model_name, error)) from error

        # Without dropout, so that a text always gets the same score.
        model = self._load_model(getattr(torch, self.dtype))
        model = model.to(existing_device(self.device)).eval().requires_grad_(False)
        return Loaded(model, tokenizer)

    def _load_model(self, dtype: Any) -> Any:
        import transformers

        return load_complete(
            getattr(transformers, self.auto_class),
            place_of(self.model_name),
            role=self.role,
            model_name=self.model_name,
            dtype=dtype,
            trust_remote_code=self.trust_remote_code,
        )

    def __getstate__(self) -> dict[str, Any]:
        # Without the weights: a process that gets this object loads them itself, on its own device.
        return {name: value for name, value in vars(self).items() if name != "loaded"}


def shared(key: Hashable, load: Callable[[], T]) -> T:
    """Return the live object under the key, else the result of `load`; only a weak reference to it is kept."""
    live = _ALIVE.get(key)
    if live is None:
        live = _ALIVE[key] = load()
    return live


def batches_by_length(rows: Sequence[Sequence[Any]], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of indices, longest rows first, so that a lack of memory shows in the first batch."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def require_finite(answers: Any, what: str, model_name: str) -> None:
    """Raise a `ModelError` if a model returned NaN or infinity, which comparisons would turn into valid numbers.

    `answers` is a tensor or array with one entry or row per input, `what` the role of the model.
    """
    import torch

    # Indices of the values that are not finite, [n_broken, n_dimensions]; the first column is the input.
    answers = torch.as_tensor(answers)
    broken = (~answers.isfinite()).nonzero()
    if len(broken):
        first = answers[tuple(broken[0])].item()
        n_inputs = broken[:, 0].unique().numel()
        raise ModelError(
            f"the {what} {model_name!r} returned {first} for input {int(broken[0, 0])}, the first of {n_inputs} such "
            f"inputs out of {len(answers)}: the weights are corrupt, or the values overflow (try another dtype)"
        )


def version_of(model_name: str) -> int:
    """Return the newest modification time in a local folder, so that a rewritten folder is read again; else 0."""
    folder = Path(place_of(model_name))
    if not folder.is_dir():
        return 0
    return max((path.stat().st_mtime_ns for path in folder.iterdir()), default=0)


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """Return the maximum number of input tokens of a model, including special tokens; None without a limit.

    It is the smallest of the tokenizer's limit, the config's limit, and the usable rows of the learned position
    embeddings: in RoBERTa's table, no token uses the first rows.
    """
    import torch

    # Tokenizer and config may lack a limit or have a wrong one. A position beyond the table of embeddings is an error,
    # on a GPU one after which the process cannot use the GPU any more.
    limits = [getattr(tokenizer, "model_max_length", None), n_positions(model)]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.endswith("position_embeddings"):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - unused)

    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def n_positions(model: Any) -> int | None:
    """Return the number of positions in a model's config, or None if the config has no such entry."""
    # BERT's name and GPT-2's name. A model with relative positions may have neither.
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number > 0:
            return number
    return None


def model_inputs(rows: Sequence[Sequence[int]], padding: int, device: Any) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` of rows of token ids, `[n, longest]` each, padded on the right."""
    from rl4lms_like.core.episodes import padded

    ids, mask = padded(rows, padding)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
