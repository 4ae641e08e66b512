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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl4lms_like.core.not_included import GGUF_FILES
from rl4lms_like.system.disk import with_home
from rl4lms_like.system.errors import ModelError, RL4LMsLikeError
from rl4lms_like.system.out_of_memory import is_out_of_memory
from rl4lms_like.system.regular_files import require_regular_file

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer in the name of a weight: `layers.0.weight`."""
_N_NAMED = 6
"""Number of weights that a message names."""
_N_FILES = 8
"""Number of files that a message names."""

Unused = Callable[[Any], Collection[str]]
"""Function that returns the names of the modules that a role does not use. Their weights may be missing."""


def place_of(model_name: str) -> str:
    """Return a name as transformers accepts it, with `~` expanded.

    Raises:
        ModelError: it is a folder that contains a device or a pipe, for whose content transformers would wait for ever.
    """
    name = str(with_home(model_name)) if model_name.startswith("~") else model_name
    files: list[Path] = []
    with suppress(OSError, ValueError):  # no local folder, or not readable, which transformers reports
        files = sorted(Path(name).iterdir())
    for file in files:
        try:
            require_regular_file(file)
        except RL4LMsLikeError as error:
            raise ModelError(f"cannot load {model_name!r}: {error}") from error
    return name


def names_folder(model_name: str) -> bool:
    """Return whether a name means a local folder: hub ids are `name` or `owner/name`.

    `owner/name` means a folder only if a folder `owner` exists.
    """
    if model_name.startswith((".", "/", "~")) or model_name.count("/") > 1 or "\\" in model_name:
        return True

    # `models/mine` may be both; the parent decides, so that a folder that is missing in `models` is not sought on the
    # hub.
    return "/" in model_name and Path(model_name).parent.is_dir()


def require_folder(what: str, model_name: str) -> None:
    """Report a missing checkpoint early, where its name means a local folder; `what` is its role, for the message.

    Raises:
        ModelError: the folder does not exist, or contains a device or a pipe.
    """
    # A relative path that is missing is often one of another working directory, so the message names it.
    folder = Path(place_of(model_name))
    if names_folder(model_name) and not folder.is_dir():
        below = "" if folder.is_absolute() else f" below {Path.cwd()}"
        raise ModelError(f"there is no folder {model_name!r}{below}; it should contain the {what}")


def cannot_load(what: str, model_name: str, error: Exception) -> str:
    """Return the message for a checkpoint that cannot be loaded: its name, what was found there, and the error."""
    folder = Path(place_of(model_name))
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        hint = GGUF_FILES.sentence
    elif folder.is_dir():
        names = sorted(path.name for path in folder.iterdir())[:_N_FILES]
        hint = f"the folder contains: {', '.join(names) or 'nothing'}"
    elif folder.is_absolute() or model_name.startswith((".", "~")):
        hint = "there is no such folder"
    else:
        hint = (
            "neither a local folder nor a model found on the hub or in its cache; "
            "embedded/gpt2-films and other built-in models need no download"
        )

    # The first line of the error: transformers adds paragraphs of advice, most of it about the hub.
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"cannot load the {what} {model_name!r} ({hint}): {type(error).__name__}: {reason}"


def pooler(model: Any) -> Collection[str]:
    """Return the name of the pooler, which is not used where only the hidden states are needed."""
    return ("pooler",)


def output_layer(model: Any) -> Collection[str]:
    """Return the name of the output layer, which is not used where only the hidden states are needed."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head]


def load_complete(
    auto_class: Any,
    checkpoint: str | None,
    *,
    role: str,
    model_name: str,
    unused: Unused | None = None,
    **options: Any,
) -> Any:
    """Load a model with transformers' `from_pretrained`, without changing the state of random number generators.

    Args:
        auto_class: class of transformers that loads the model.
        checkpoint: hub id or path of a folder; None where `options` contain the weights.
        role: the model's role, for messages.
        model_name: the model's name, for messages.
        unused: modules that the role does not use.
        **options: arguments of `from_pretrained`.

    Raises:
        ModelError: weights are missing, have another shape, or belong to layers that the config does not build; the
            message names them. Also raised if transformers cannot load the model.
        Exception: there is too little memory; see `system.out_of_memory.is_out_of_memory`.
    """
    with _named(role, model_name):
        model, extra = _load(auto_class, checkpoint, role=role, model_name=model_name, unused=unused, options=options)

    # Not an error: a classifier's checkpoint, for instance, has a head that a language model has not.
    if extra:
        logger.warning(
            "the %s %r: %s does not use its weights %s", role, model_name, type(model).__name__, _listed(extra)
        )
    return model


def check_complete(
    auto_class: Any, checkpoint: str, *, role: str, model_name: str, unused: Unused | None = None, **options: Any
) -> bool:
    """Compare the names and shapes of a folder's weights with those of its model; arguments as in `load_complete`.

    Returns:
        Whether they could be compared. The weights of a hub id are compared when they are loaded.

    Raises:
        ModelError: see `load_complete`.
    """
    if not Path(checkpoint).is_dir():
        return False

    # On the meta device a model has names and shapes, but no values: nothing large is read.
    options["device_map"] = "meta"
    with _named(role, model_name):
        try:
            _load(auto_class, checkpoint, role=role, model_name=model_name, unused=unused, options=options)
        except RuntimeError:  # the class computes with weights, which have no values on the meta device
            return False
    return True


def _load(
    auto_class: Any,
    checkpoint: str | None,
    *,
    role: str,
    model_name: str,
    unused: Unused | None,
    options: Mapping[str, Any],
) -> tuple[Any, set[str]]:
    """Return the model, and the names of the checkpoint's weights that it does not use."""
    import torch

    # transformers initialises missing weights at random, and so would change the random numbers of the run. Weights of
    # another shape are ignored here in order to report all of them at once.
    with torch.random.fork_rng(devices=[]), _without_report():
        model, report = auto_class.from_pretrained(
            checkpoint, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    unused_modules = () if unused is None else unused(model)
    _require_complete(model, report, role=role, model_name=model_name, unused_modules=unused_modules)
    return model, set(report["unexpected_keys"])


def _require_complete(
    model: Any, report: Mapping[str, Any], *, role: str, model_name: str, unused_modules: Collection[str]
) -> None:
    """Raise a `ModelError` with everything that is wrong with a checkpoint; see the table of the module."""
    # `report` is that of transformers' `output_loading_info`.
    prefixes = tuple(f"{name}." for name in unused_modules)
    missing = [name for name in report["missing_keys"] if not name.startswith(prefixes)]
    shapes = {}  # name -> shapes in the checkpoint and in the model
    for name, in_checkpoint, in_model in report["mismatched_keys"]:
        if not name.startswith(prefixes):
            shapes[name] = (in_checkpoint, in_model)
    cut_off = _of_layers_not_built(report["unexpected_keys"], model.state_dict())

    problems = []
    if missing:
        problems.append(f"it has no weights for {_listed(missing)}")
    for name, (in_checkpoint, in_model) in sorted(shapes.items())[:_N_NAMED]:
        problems.append(f"{name} has the shape {list(in_checkpoint)}, expected {list(in_model)}")
    if len(shapes) > _N_NAMED:
        problems.append(f"and {len(shapes) - _N_NAMED} more have another shape")
    if cut_off:
        problems.append(f"its config builds no layers for {_listed(cut_off)}")

    if problems:
        kind = type(model).__name__
        raise ModelError(
            f"the {role} {model_name!r} does not fit {kind}: {'; '.join(problems)}. Copy the complete checkpoint "
            f"again, correct its config.json, or name a checkpoint that was saved as a {kind}"
        )


def _of_layers_not_built(unexpected: Iterable[str], built: Iterable[str]) -> list[str]:
    """Return the names of weights that the model has only in layers with other numbers."""
    # layers.*.weight -> layers.0.weight, layers.1.weight
    built_by_pattern: dict[str, list[str]] = {}
    for name in built:
        built_by_pattern.setdefault(_NUMBER.sub("*", name), []).append(name)

    # The weight of a layer is cut off if the model has such a weight in other layers only: the config has fewer layers
    # than the checkpoint. A weight without a counterpart in any layer belongs to another module, and is only logged.
    cut_off = []
    for name in unexpected:
        pattern = _NUMBER.sub("*", name)
        if "*" not in pattern:
            continue
        counterparts: list[str] = []
        for built_pattern, names in built_by_pattern.items():
            if _equal_up_to_prefix(built_pattern, pattern):
                counterparts += names
        if counterparts and not any(_equal_up_to_prefix(counterpart, name) for counterpart in counterparts):
            cut_off.append(name)
    return cut_off


def _equal_up_to_prefix(name: str, other: str) -> bool:
    """Return whether one name ends with the other: `model.layers.0.weight`, `layers.0.weight`."""
    # The dot keeps `embed.weight` and `reembed.weight` apart.
    return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")


def _listed(names: Iterable[str]) -> str:
    """Return names as one line, with those of numbered layers grouped."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)

    labels = []
    for pattern, members in groups.items():
        labels.append(members[0] if len(members) == 1 else f"{pattern} ({len(members)} of them)")
    line = ", ".join(labels[:_N_NAMED])
    if len(labels) > _N_NAMED:
        line += f" and {len(labels) - _N_NAMED} more"
    return line


@contextmanager
def _named(role: str, model_name: str) -> Iterator[None]:
    """Convert exceptions of transformers to a `ModelError` that names the model."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise  # the checkpoint is not to blame; callers have another message for this
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
