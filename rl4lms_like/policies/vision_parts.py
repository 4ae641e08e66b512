"""Parts of a vision-language model, and which of them are trained (`train_vision`).

    tower        picture -> features                  vision_tower, visual, vision_model ...
    projector    features -> the text's embeddings    multi_modal_projector, connector, merger ...
    the rest     language model and output layer      always trained

A part is found by its place: what is outside of the language model belongs to vision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rl4lms_like.policies.arguments import TrainVision
from rl4lms_like.system.errors import ModelError

PROJECTORS = "projector|connector|merger|aligner|resampler"
"""Regular expression of the names of projectors, also of those that are within the tower's module."""


def freeze_vision(model: PreTrainedModel, train_vision: TrainVision) -> None:
    """Freeze the parts of a model's vision that are not trained, in place.

    Raises:
        ModelError: the model has no language model of its own, or no projector although it is to be trained.
    """
    if train_vision == "all":
        return
    untrained = re.compile(untrained_modules(model, train_vision))
    frozen = [name for name, _ in model.named_parameters() if untrained.fullmatch(name)]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


def untrained_modules(model: PreTrainedModel, train_vision: TrainVision) -> str:
    """Return a regular expression of the names of modules and weights that `train_vision` leaves as they are.

    Raises:
        ModelError: as in `freeze_vision`.
    """
    of_text = [re.escape(_name_of(model, module)) for module in (model.get_decoder(), model.get_output_embeddings())]
    trained = rf"({'|'.join(of_text)})(\..*)?$"
    if train_vision == "projector":
        names = [name for name, _ in model.named_parameters() if not re.match(trained, name)]
        if not any(re.search(PROJECTORS, name) for name in names):
            raise ModelError(
                f"train_vision: projector finds no projector in {type(model).__name__} (a module whose name has "
                f"{PROJECTORS.replace('|', ', ')}): use none or all"
            )
        trained = rf"{trained}|.*({PROJECTORS})"
    return rf"(?!{trained}).*"


def within_scope(model: PreTrainedModel, peft: Mapping[str, Any], train_vision: TrainVision) -> dict[str, Any]:
    """Return the fields of adapters that leave out the parts of a model's vision that are not trained."""
    if train_vision == "all":
        return dict(peft)
    patterns = [untrained_modules(model, train_vision)]
    given = peft.get("exclude_modules")
    if isinstance(given, str):
        patterns.append(given)
    elif given:
        patterns.append(rf"(.*\.)?({'|'.join(map(re.escape, given))})")
    return {**peft, "exclude_modules": "|".join(f"({pattern})" for pattern in patterns)}


def _name_of(model: PreTrainedModel, module: nn.Module | None) -> str:
    """Return the name of a module within a model."""
    for name, other in model.named_modules():
        if other is module and name:
            return name
    raise ModelError(
        f"{type(model).__name__} has no language model of its own beside its vision: use train_vision: all"
    )
