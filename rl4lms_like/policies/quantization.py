"""Arguments of a quantized base: the block `quantization` of a policy, and of runs on given texts. No torch here.

    nf4     4-bit NormalFloat of bitsandbytes, blocks of 64 weights (QLoRA, Dettmers et al., arXiv 2305.14314)
    int8    8-bit integers of torchao, one scale for each row

Only the frozen weights of linear layers are quantized (`policies.quantized_layers`). They are dequantized for each
product, so that activations and gradients have the precision of `dtype`, and what is trained are adapters in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from rl4lms_like.system.errors import ConfigIssue, require_extra
from rl4lms_like.system.schema import Block, RefusedError, check_arguments
from rl4lms_like.system.wording import shown

KEY = "quantization"
"""Argument of a policy, and key of `alg` in other runs."""


@dataclass(frozen=True, kw_only=True)
class NF4Arguments(Block):
    """Arguments of `{id: nf4}`: 4-bit NormalFloat.

    Args:
        double: quantize the scales of the blocks too: 0.52 instead of 0.56 bytes for each weight.
    """

    double: bool = False


@dataclass(frozen=True, kw_only=True)
class Int8Arguments(Block):
    """Arguments of `{id: int8}`: it has none."""


QUANTIZATIONS: dict[str, type[Block]] = {"nf4": NF4Arguments, "int8": Int8Arguments}
"""Id -> class of the arguments next to it."""

PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao"}
"""Id -> package that quantizes, and extra that installs it."""

_REFUSED = {
    "llm_int8": "is not supported: it quantizes activations with a scale of their batch, so that log-probs would "
    "depend on padding (a first KL of 2.3 nats was measured)",
    "int4": "is not supported: torchao has no 4-bit kernel that computes gradients on every device",
    "fp4": "is not supported: nf4 needs the same memory and has smaller errors",
}
"""Other methods by the names that users may expect -> the reason."""


def checked_quantization(quantization: dict[str, Any]) -> dict[str, Any]:
    """Return the id and the arguments of a quantization, coerced to their types.

    Raises:
        RefusedError: lists all errors.
    """
    id = quantization.get("id")
    ids = " or ".join(QUANTIZATIONS)
    if not isinstance(id, str):
        raise RefusedError(ConfigIssue("", f"expected a mapping with an id, {ids}; got {shown(quantization)}"))
    if id not in QUANTIZATIONS:
        reason = _REFUSED.get(id, "is unknown")
        raise RefusedError(ConfigIssue("id", f"{shown(id)} {reason}; use {ids}"))

    given = {key: value for key, value in quantization.items() if key != "id"}
    fields, issues = check_arguments(QUANTIZATIONS[id], given, "")
    if issues:
        raise RefusedError(*issues)
    return {"id": id, **fields}


Quantization = Annotated[dict[str, Any], AfterValidator(checked_quantization)]
"""Type of a `quantization` block."""


def require_package(quantization: Mapping[str, Any] | None) -> None:
    """Check that the package of a quantization is installed, if there is one.

    Raises:
        MissingExtraError: it is not.
    """
    if quantization is not None:
        package = PACKAGES[quantization["id"]]
        require_extra(package, extra=package, needed_by=f"{KEY}: {{id: {quantization['id']}}}")


def quantization_issues(
    quantization: Mapping[str, Any] | None, peft: Mapping[str, Any] | None
) -> Iterator[ConfigIssue]:
    """Yield the errors of a quantized base with its adapters; paths are those of the block that has both keys."""
    if quantization is None:
        return
    if peft is None:
        message = "quantized weights are frozen, and only adapters can be trained: set peft, for example "
        yield ConfigIssue(KEY, message + "{r: 8, target_modules: all-linear}; or remove it")
    elif peft.get("use_dora"):
        message = "rescales the weights of the base, which quantization stores in other units; remove one of them"
        yield ConfigIssue("peft.use_dora", message)
