"""Exact speedups of a policy, each of which can be turned off: the block `alg.policy.args.speedups`. No torch here.

    new run                  its config.json has every speedup, also those that the config does not name
    config.json without it   a run of a version without speedups: it is resumed without them, with the same bytes

"Exact" means that numbers differ by rounding only: gradients by at most 1e-4 of their norm, trained weights by at most
1 % of an optimizer step. A run that is resumed keeps its speedups, because rounding and random numbers depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from rl4lms_like.system.schema import Block, coerced_mapping

KEY = "speedups"
"""Argument of a policy."""
PATH = f"alg.policy.args.{KEY}"
"""Its place in a config."""


@dataclass(frozen=True, kw_only=True)
class Speedups(Block):
    """Speedups of rollouts and updates. They are on where they apply; false turns one off.

    Args:
        keep_freed_memory: on processors under Linux, let the C library reuse freed memory instead of returning it to
            the system, which would clear each large tensor's pages again. The numbers stay the same.
        fused_activations: compute the activation `gelu_new` of GPT-2 and others as one operation.
        onednn: on AMD processors with AVX-512, multiply many rows by oneDNN's float32 kernel instead of MKL's.
        grouped_attention: on processors, read the keys and values of grouped-query attention without copying them for
            each head.
        merged_adapters: with `peft`, compute with copies of the adapted weights into which the adapters are merged, in
            generation, scoring and updates. Needs memory for these copies.
        sampler_log_probs: use the log-probs and entropies of the sampling in place of the policy's pass over a rollout,
            where the policy's own distribution is sampled. The first ratio of each update checks them.
        fast_decoding: sample the responses of decoder-only models with a loop that writes keys and values into one
            buffer, and finds a token with one random number. The distribution stays the same, the texts of a seed do
            not. Other models and arguments (beams ...) use the steps of transformers' `generate`.
        packed_weights: on AMD processors with AVX-512, generate with copies of the linear layers' weights in the order
            in which oneDNN's kernel reads them. Needs memory for these copies while responses are generated.
    """

    keep_freed_memory: bool = True
    fused_activations: bool = True
    onednn: bool = True
    grouped_attention: bool = True
    merged_adapters: bool = True
    sampler_log_probs: bool = True
    fast_decoding: bool = True
    packed_weights: bool = True


def all_speedups(given: Mapping[str, Any] | None = None) -> dict[str, bool]:
    """Return every speedup with its value in a `speedups` block, or its default."""
    return {**asdict(Speedups()), **(given or {})}


def no_speedups() -> dict[str, bool]:
    """Return the block of a run of a version without speedups."""
    return dict.fromkeys(all_speedups(), False)


def stored_speedups(given: Mapping[str, Any] | None) -> dict[str, bool]:
    """Return the speedups of a saved run or algorithm, where a missing one did not exist yet."""
    return {**no_speedups(), **(given or {})}


def has_speedups(arguments_class: Any) -> bool:
    """Return whether a policy has the argument `speedups`, by the class of its arguments; a user's may not have it."""
    return KEY in getattr(arguments_class, "__dataclass_fields__", {})


SpeedupFields = Annotated[dict[str, Any], AfterValidator(partial(coerced_mapping, Speedups))]
"""Type of a `speedups` block."""
