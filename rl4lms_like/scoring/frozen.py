"""Models that score and are never trained: loaded at first use, shared, left behind when they are pickled.

FrozenModel("owner/name", "AutoModelForSequenceClassification")     a name; a folder that is not there is an error now
    .loaded      model (evaluation mode, no gradients, on its device) and tokenizer, at first use
    pickled      the name again; the process that gets it loads its own

Two frozen models of one checkpoint, say a reward's and a metric's, hold the same weights while both are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from rl4lms_like.core.devices import existing_device
from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.model_names import cannot_load, place_of, require_folder
from rl4lms_like.core.model_weights import check_complete, load_complete

T = TypeVar("T")

_NO_LIMIT = 10**9
"""Tokenizers that know no limit say 1e30."""

_ALIVE: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in evaluation mode, and its tokenizer, which cuts long texts as asked for."""

    model: Any
    tokenizer: Any


class FrozenModel:
    """A checkpoint that scores texts.

    Args:
        model_name: hub id or local folder.
        auto_class: name of transformers' class that loads it, `AutoModelForSequenceClassification`.
        role: what it is for, in messages.
        device: `auto`, `cpu`, `cuda:1` ...
        dtype: of its weights.
        truncation_side: which end of a text is cut where it has more tokens than the model takes.
        trust_remote_code: run code that the checkpoint brings along.

    Raises:
        ModelError: the name can only be that of a local folder, and there is none; or that folder lacks weights.
        ValueError: there is no such device.
    """

    def __init__(
        self,
        model_name: str,
        auto_class: str,
        *,
        role: str = "model",
        device: str = "auto",
        dtype: str = "float32",
        truncation_side: str = "left",
        trust_remote_code: bool = False,
    ) -> None:
        self.model_name = model_name
        self.auto_class = auto_class
        self.role = role
        self.device = device
        self.dtype = dtype
        self.truncation_side = truncation_side
        self.trust_remote_code = trust_remote_code
        require_folder(role, model_name)
        existing_device(device)
        self._check_weights()

    @property
    def model(self) -> Any:
        """The model; loads it at first use."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.loaded.tokenizer

    @cached_property
    def loaded(self) -> Loaded:
        """Model and tokenizer.

        Raises:
            ModelError: they cannot be loaded; says which and why.
        """
        setting = tuple(value for name, value in sorted(vars(self).items()) if name not in ("role", "device"))
        return shared((*setting, existing_device(self.device), version_of(self.model_name)), self._load)

    def local_config(self) -> Any:
        """The config of a checkpoint in a local folder, without its weights; None for one of the hub.

        Raises:
            ModelError: the folder has no config that can be read.
        """
        place = place_of(self.model_name)
        if not Path(place).is_dir():
            return None
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(place, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            raise ModelError(cannot_load(self.role, self.model_name, error)) from error

    def _check_weights(self) -> None:
        """Refuse a local folder that lacks weights, before any are read."""
        place = place_of(self.model_name)
        if not (Path(place) / "config.json").is_file():
            return
        import transformers

        check_complete(
            getattr(transformers, self.auto_class),
            place,
            role=self.role,
            model_name=self.model_name,
            trust_remote_code=self.trust_remote_code,
        )

    def _load(self) -> Loaded:
        import torch
        import transformers

        place, code = place_of(self.model_name), self.trust_remote_code
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                place, truncation_side=self.truncation_side, trust_remote_code=code
            )
        except Exception as error:
            raise ModelError(cannot_load(self.role, self.model_name, error)) from error
        auto_class, dtype = getattr(transformers, self.auto_class), getattr(torch, self.dtype)
        model = load_complete(
            auto_class, place, role=self.role, model_name=self.model_name, dtype=dtype, trust_remote_code=code
        )
        return Loaded(model.to(existing_device(self.device)).eval().requires_grad_(False), tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "loaded"}


def shared(key: Hashable, load: Callable[[], T]) -> T:
    """What is alive under the key, else what `load` gives; nothing is kept alive for this alone."""
    found = _ALIVE.get(key)
    if found is None:
        found = _ALIVE[key] = load()
    return found


def require_finite(answers: Any, what: str, model_name: str) -> None:
    """Nothing, or an error if a model answered NaN or infinity, which comparisons would turn into numbers.

    Args:
        answers: tensor or array, an entry for each input, or a row.
        what: the role of the model, for the message.
        model_name: its checkpoint.

    Raises:
        ModelError: not all of them are finite; names the first and how many inputs there are.
    """
    import torch

    answers = torch.as_tensor(answers)
    broken = (~answers.isfinite()).nonzero()
    if len(broken):
        culprit, n_inputs = answers[tuple(broken[0])].item(), broken[:, 0].unique().numel()
        raise ModelError(
            f"the {what} {model_name!r} answered {culprit} to input {int(broken[0, 0])}, the first of {n_inputs} of "
            f"{len(answers)}: its weights are broken, or its numbers too large for their precision (another dtype?)"
        )


def version_of(model_name: str) -> int:
    """When the newest file of a local folder was written, so that a folder written anew is read anew; else 0."""
    folder = Path(place_of(model_name))
    if not folder.is_dir():
        return 0
    return max((path.stat().st_mtime_ns for path in folder.iterdir()), default=0)


def longest_input(model: Any, tokenizer: Any) -> int | None:
    """The most tokens that a model takes, its special tokens included; None where there is no limit.

    The least of what its tokenizer says, what its config says, and what its table of learned positions holds: RoBERTa's
    has rows that no token uses.
    """
    import torch

    limits = [getattr(tokenizer, "model_max_length", None), n_positions(model)]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.endswith("position_embeddings"):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - unused)
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def n_positions(model: Any) -> int | None:
    """How many positions the config of a model says that it has; None where it says nothing."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return next((n for n in found if isinstance(n, int) and n > 0), None)
