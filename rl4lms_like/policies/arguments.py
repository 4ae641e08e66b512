"""The `alg.policy.args` block: every argument of a policy, its default and its meaning. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge


@dataclass(frozen=True, kw_only=True)
class PolicyArguments:
    """Arguments of the language-model actor-critics.

    Args:
        model_name: hub id or local folder of the policy; the critic and the reference start from it too.
        optimizer_kwargs: further arguments of the optimizer (AdamW; `fused` is on unless it is set here).
        weight_decay: for all parameters but biases and normalisation weights.
        apply_model_parallel: accepted from RL4LMs' configs; has no meaning today.
        generation_kwargs: how rollouts are sampled, passed to transformers' `generate`. Unset `top_k` means 50, as
            in transformers; `top_k: 0` samples from the distribution that is trained.
        prompt_truncation_side: which side of a long prompt is cut in evaluation (rollouts use `env.args`).
        critic: `separate` (a second network from the same weights) or `shared` (a value head on the policy's trunk).
        value_head_init: `default` (torch's linear layer) or `zero` (the first values are 0).
        reference_model: hub id or folder of the frozen model that KL is measured against; default: `model_name`.
        dtype: `float32`, or `bfloat16` for autocast over float32 weights; log-probs are computed from float32 logits.
        attn_implementation: `eager`, `sdpa`, `flash_attention_2` ...; default: transformers' choice.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        compile: `torch.compile` the networks of the update.
        dropout: keep the model's dropout in updates. Ratios then differ from 1 at the first minibatch.
        logits_budget_mb: logits kept between forward and backward, MiB; more tokens x vocabulary than that are
            recomputed in chunks of this size.
        trust_remote_code: run code that a hub model brings along.
    """

    model_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    weight_decay: Annotated[float, Ge(0)] = 1e-6
    apply_model_parallel: bool = True
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_truncation_side: Literal["left", "right"] = "left"
    critic: Literal["separate", "shared"] = "separate"
    value_head_init: Literal["default", "zero"] = "default"
    reference_model: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    dropout: bool = False
    logits_budget_mb: Annotated[float, Ge(1)] = 512
    trust_remote_code: bool = False

    @classmethod
    def known_in(cls, arguments: Mapping[str, Any]) -> PolicyArguments:
        """Those of `arguments` that every policy takes; a user's policy may take further ones."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names})
