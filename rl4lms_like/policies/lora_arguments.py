"""The `policy.args.peft` block: supported fields of PEFT's `LoraConfig`. Does not import torch or PEFT.

Unsupported fields would train or change weights of the base, which policy, critic and reference share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from rl4lms_like.core.errors import Mistake
from rl4lms_like.core.numbers import Count
from rl4lms_like.core.schema import check_arguments, join
from rl4lms_like.core.wording import shown


@dataclass(frozen=True, kw_only=True)
class LoraArguments:
    """Arguments of low-rank adapters (arXiv 2106.09685); names and defaults are those of PEFT's `LoraConfig`.

    Args:
        r: rank of the adapters.
        lora_alpha: adapters are scaled by `lora_alpha / r`.
        lora_dropout: dropout on the input of the adapters; 0 unless `dropout` is on.
        target_modules: names of the linear layers that get adapters, a regular expression, or `all-linear`; default:
            PEFT's choice for the model's family.
        exclude_modules: names, or a regular expression, of layers without adapters.
        layers_to_transform: indices of the blocks that get adapters; default: all.
        layers_pattern: name of the list of blocks, if PEFT does not find it.
        rank_pattern: name or regular expression -> rank of these layers.
        alpha_pattern: name or regular expression -> `lora_alpha` of these layers.
        use_rslora: scale by `lora_alpha / sqrt(r)` (arXiv 2312.03732).
        use_dora: train magnitude and direction of the weights separately (arXiv 2402.09353).
        init_lora_weights: true, `gaussian` or `orthogonal`; the initial contribution of the adapters is always 0.
        bias: biases are not trained.
        peft_type: LoRA is the only supported kind of adapter.
    """

    r: Count = 8
    lora_alpha: Count = 8
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, Count] = field(default_factory=dict)
    alpha_pattern: dict[str, Count] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: Literal[True, "gaussian", "orthogonal"] = True
    bias: Literal["none"] = "none"
    peft_type: Literal["LORA"] = "LORA"

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of PEFT's `LoraConfig`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "peft_type"}
        return fields | {"rank_pattern": dict(self.rank_pattern), "alpha_pattern": dict(self.alpha_pattern)}


_INSTEAD = {
    "modules_to_save": "is not supported: these layers are weights of the base, which stays frozen",
    "trainable_token_indices": "is not supported: embeddings are weights of the base, which stays frozen",
    "task_type": "cannot be set: it is determined by the model's family",
    "inference_mode": "cannot be set: adapters are trained",
    "fan_in_fan_out": "cannot be set: it is determined by the layers",
    "base_model_name_or_path": "cannot be set: it is the model_name",
}
"""Unsupported fields of `LoraConfig` -> the reason."""


def lora_mistakes(peft: Any, path: str) -> list[Mistake]:
    """Return all errors of a `peft` block; null is valid.

    Args:
        peft: the value in the config.
        path: its path, `alg.policy.args.peft`.
    """
    if peft is None:
        return []
    if not isinstance(peft, Mapping):
        return [Mistake(path, f"expected null or a mapping with fields of PEFT's LoraConfig, got {shown(peft)}")]
    mistakes = [Mistake(join(path, key), _INSTEAD[key]) for key in peft if key in _INSTEAD]
    known = {key: value for key, value in peft.items() if key not in _INSTEAD}
    bound, wrong = check_arguments(LoraArguments, known, path)
    return mistakes + (wrong or _pattern_mistakes(bound, path))


def _pattern_mistakes(peft: Mapping[str, Any], path: str) -> list[Mistake]:
    """Return errors for an empty list of layers and for invalid regular expressions."""
    mistakes = []
    if peft.get("target_modules") in ([], ""):
        message = "is empty; list layers, write all-linear, or remove it to use PEFT's default for the family"
        mistakes.append(Mistake(join(path, "target_modules"), message))
    patterns = [(join(path, key), peft.get(key)) for key in ("target_modules", "exclude_modules")]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns += [(join(path, key), pattern) for pattern in peft.get(key) or ()]
    for place, pattern in patterns:
        if isinstance(pattern, str):
            try:
                re.compile(pattern)
            except re.error as error:
                mistakes.append(Mistake(place, f"{shown(pattern)} is not a valid regular expression: {error}"))
    return mistakes
