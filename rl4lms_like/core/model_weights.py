"""Load models only from complete checkpoints; transformers initialises weights at random that a checkpoint lacks.

missing      in the model, not in the checkpoint                              error, unless the role does not use it
mismatched   with another shape in the checkpoint                             error
cut off      in the checkpoint, for a layer that the config does not build    error
unused       in the checkpoint, the model has no such module                  logged

Tied weights, and names that a model's class ignores (`_keys_to_ignore_on_load_missing`), do not count as missing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl4lms_like.core.disk import with_home
from rl4lms_like.core.errors import ModelError
from rl4lms_like.core.out_of_memory import is_out_of_memory


def place_of(model_name: str) -> str:
    """Return a name as transformers accepts it, with `~` expanded."""
    return str(with_home(model_name)) if model_name.startswith("~") else model_name


def names_folder(model_name: str) -> bool:
    """Return whether a name means a local folder: hub ids are `name` or `owner/name`.

    `owner/name` means a folder only if a folder `owner` exists.
    """
    if model_name.startswith((".", "/", "~")) or model_name.count("/") > 1 or "\\" in model_name:
        return True
    return "/" in model_name and Path(model_name).parent.is_dir()


def require_folder(what: str, model_name: str) -> None:
    """Report a missing checkpoint early, where its name means a local folder; `what` is its role, for the message.

    Raises:
        ModelError: the folder does not exist.
    """
    folder = Path(place_of(model_name))
    if names_folder(model_name) and not folder.is_dir():
        below = "" if folder.is_absolute() else f" below {Path.cwd()}"
        raise ModelError(f"there is no folder {model_name!r}{below}; it should contain the {what}")


def cannot_load(what: str, model_name: str, error: Exception) -> str:
    """Return the message for a checkpoint that cannot be loaded: its name, what was found there, and the error."""
    folder = Path(place_of(model_name))
    if folder.is_dir():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        hint = f"the folder contains: {found}"
    elif folder.is_absolute() or model_name.startswith((".", "~")):
        hint = "there is no such folder"
    else:
        hint = "neither a local folder nor a model found on the hub or in its cache"
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"cannot load the {what} {model_name!r} ({hint}): {type(error).__name__}: {reason}"


logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_N_NAMED = 6

Unused = Callable[[Any], Collection[str]]
"""Function that returns the names of the modules that a role does not use. Their weights may be missing."""


def pooler(model: Any) -> Collection[str]:
    """Return the name of the pooler, which is not used where only the hidden states are needed."""
    return ("pooler",)


def output_layer(model: Any) -> Collection[str]:
    """Return the name of the output layer, which is not used where only the hidden states are needed."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head]


def load_complete(
    auto_class: Any, place: str | None, *, role: str, model_name: str, unused: Unused | None = None, **options: Any
) -> Any:
    """Load a model with transformers' `from_pretrained`, without changing the state of random number generators.

    Args:
        auto_class: class of transformers that loads the model.
        place: hub id or path of a folder; None where `options` contain the weights.
        role: the model's role, for messages.
        model_name: the model's name, for messages.
        unused: modules that the role does not use.
        **options: arguments of `from_pretrained`.

    Raises:
        ModelError: weights are missing, have another shape, or belong to layers that the config does not build; the
            message names them. Also raised if transformers cannot load the model.
        Exception: there is too little memory; see `core.out_of_memory.is_out_of_memory`.
    """
    with _named(role, model_name):
        model, others = _load(auto_class, place, role, model_name, unused, options)
    if others:
        logger.warning(
            "the %s %r: %s does not use its weights %s", role, model_name, type(model).__name__, _listed(others)
        )
    return model


def check_complete(
    auto_class: Any, place: str, *, role: str, model_name: str, unused: Unused | None = None, **options: Any
) -> bool:
    """Compare the names and shapes of a folder's weights with those of its model; arguments as in `load_complete`.

    Returns:
        Whether they could be compared. The weights of a hub id are compared when they are loaded.

    Raises:
        ModelError: see `load_complete`.
    """
    if not Path(place).is_dir():
        return False
    with _named(role, model_name):
        try:
            _load(auto_class, place, role, model_name, unused, options | {"device_map": "meta"})
        except RuntimeError:  # the class computes with weights, which have no values on the meta device
            return False
    return True


def _load(
    auto_class: Any, place: str | None, role: str, model_name: str, unused: Unused | None, options: Mapping[str, Any]
) -> tuple[Any, set[str]]:
    """Return the model, and the names of the checkpoint's weights that it does not use."""
    import torch

    with torch.random.fork_rng(devices=[]), _without_report():
        model, report = auto_class.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    _require_complete(model, report, role, model_name, () if unused is None else unused(model))
    return model, set(report["unexpected_keys"])


def _require_complete(
    model: Any, report: Mapping[str, Any], role: str, model_name: str, unused: Collection[str]
) -> None:
    prefixes = tuple(f"{name}." for name in unused)
    missing = [name for name in report["missing_keys"] if not name.startswith(prefixes)]
    shapes = {name: shapes for name, *shapes in report["mismatched_keys"] if not name.startswith(prefixes)}
    cut_off = _of_layers_not_built(report["unexpected_keys"], model.state_dict())
    wrong = []
    if missing:
        wrong.append(f"it has no weights for {_listed(missing)}")
    for name, (found, expected) in sorted(shapes.items())[:_N_NAMED]:
        wrong.append(f"{name} has the shape {list(found)}, expected {list(expected)}")
    if len(shapes) > _N_NAMED:
        wrong.append(f"and {len(shapes) - _N_NAMED} more have another shape")
    if cut_off:
        wrong.append(f"its config builds no layers for {_listed(cut_off)}")
    if wrong:
        kind = type(model).__name__
        raise ModelError(
            f"the {role} {model_name!r} does not fit {kind}: {'; '.join(wrong)}. Copy the complete checkpoint again, "
            f"correct its config.json, or name a checkpoint that was saved as a {kind}"
        )


def _of_layers_not_built(unexpected: Iterable[str], built: Iterable[str]) -> list[str]:
    """Return the names of weights that the model has only in layers with other numbers."""
    by_pattern: dict[str, list[str]] = {}
    for name in built:
        by_pattern.setdefault(_NUMBER.sub("*", name), []).append(name)
    cut_off = []
    for name in unexpected:
        pattern = _NUMBER.sub("*", name)
        alike = [each for other, names in by_pattern.items() if _one_ends_with(other, pattern) for each in names]
        if "*" in pattern and alike and not any(_one_ends_with(each, name) for each in alike):
            cut_off.append(name)
    return cut_off


def _one_ends_with(one: str, other: str) -> bool:
    """Return whether the names are equal up to a prefix: `model.layers.0.weight`, `layers.0.weight`."""
    return f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")


def _listed(names: Iterable[str]) -> str:
    """Return names as one line, with those of numbered layers grouped."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    text = [each[0] if len(each) == 1 else f"{pattern} ({len(each)} of them)" for pattern, each in groups.items()]
    return ", ".join(text[:_N_NAMED]) + (f" and {len(text) - _N_NAMED} more" if len(text) > _N_NAMED else "")


@contextmanager
def _named(role: str, model_name: str) -> Iterator[None]:
    """Convert exceptions of transformers to a `ModelError` that names the model."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(cannot_load(role, model_name, error)) from error


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' own report of these weights, except for failed conversions, to which its errors refer."""

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "LOAD REPORT" not in message or "CONVERSION" in message

    library = logging.getLogger("transformers.modeling_utils")
    library.addFilter(keep)
    try:
        yield
    finally:
        library.removeFilter(keep)
