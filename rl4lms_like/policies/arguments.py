"""The `alg.policy.args` block: every argument of a policy, its default and its meaning. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Lt

from rl4lms_like.core.errors import ConfigError, Mistake
from rl4lms_like.core.numbers import Count, NonNegative
from rl4lms_like.core.schema import join

Arguments = TypeVar("Arguments", bound="PolicyArguments")


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
        critic: `separate` (a second network from the same weights), `shared` (a value head on the policy's trunk) or
            `none` (all values are 0). Default: `separate`, or `none` where the algorithm learns no values.
        critic_model: hub id or folder that a separate critic starts from, with the policy's tokens; its width may be
            another. Default: `model_name`.
        value_head_init: `zero` (the first values are 0) or `default` (torch's linear layer, whose first values are
            random numbers, larger than most rewards).
        reference_model: hub id or folder of the frozen model that KL is measured against; default: `model_name`.
        dtype: `float32`, or `bfloat16` for autocast over float32 weights; log-probs are computed from float32 logits.
        attn_implementation: `eager`, `sdpa`, `flash_attention_2` ...; default: transformers' choice.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        compile: `torch.compile` the networks of the update.
        dropout: keep the model's dropout in updates. Ratios then differ from 1 at the first minibatch.
        peft: train low-rank adapters instead of the weights: fields of PEFT's `LoraConfig`, `{r: 8, lora_alpha: 16}`.
        merge_on_save: with `peft`, save a whole model with the adapters merged into it; otherwise the adapters only.
        logits_budget_mb: logits kept between forward and backward, MiB; more tokens x vocabulary than that are
            recomputed in chunks of this size.
        trust_remote_code: run code that a hub model brings along.
    """

    model_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    weight_decay: NonNegative = 1e-6
    apply_model_parallel: bool = True
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_truncation_side: Literal["left", "right"] = "left"
    critic: Literal["separate", "shared", "none"] = "separate"
    critic_model: str | None = None
    value_head_init: Literal["zero", "default"] = "zero"
    reference_model: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    dropout: bool = False
    peft: dict[str, Any] | None = None
    merge_on_save: bool = False
    logits_budget_mb: Annotated[float, Ge(1)] = 512
    trust_remote_code: bool = False

    @classmethod
    def known_in(cls: type[Arguments], arguments: Mapping[str, Any]) -> Arguments:
        """Those of `arguments` that every policy of the kind takes; a user's policy may take further ones."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names})


@dataclass(frozen=True, kw_only=True)
class MaskablePolicyArguments(PolicyArguments):
    """Arguments of the maskable policies, beside those of all policies (NLPO, arXiv 2210.01241).

    Args:
        mask_type: which tokens may be chosen: the `learned_top_k` or `learned_top_p` ones of the mask model, a copy of
            the policy that lags behind it; or `topk`, the policy's own best of those that `generation_kwargs` leave,
            without a mask model.
        top_mask: for `learned_top_p` the probability that the allowed tokens have together, above 0 and at most 1; for
            the others their number.
        min_tokens_to_keep: with `learned_top_p` at least so many tokens stay allowed. Special tokens always are.
        target_update_iterations: the mask model takes over the policy after every so many iterations.
        mask_ema: share of the mask model that stays when it takes over the policy; default: none, it becomes a copy.
    """

    mask_type: Literal["learned_top_k", "learned_top_p", "topk"] = "learned_top_k"
    top_mask: int | float
    min_tokens_to_keep: Count = 100
    target_update_iterations: Count = 1000
    mask_ema: Annotated[float, Ge(0), Lt(1)] | None = None

    def __post_init__(self) -> None:
        """Checks what several arguments say together."""
        mistakes = mask_mistakes(asdict(self))
        if mistakes:
            raise ConfigError(mistakes, f"the arguments of a maskable policy ({self.model_name})")


def mask_mistakes(arguments: Mapping[str, Any], path: str = "") -> list[Mistake]:
    """What is wrong with a maskable policy's arguments taken together; those that are missing are not looked at.

    Args:
        arguments: of `MaskablePolicyArguments`, each of the right type.
        path: where they stand in a config.
    """
    mistakes = []
    mask_type, top_mask = arguments.get("mask_type", "learned_top_k"), arguments.get("top_mask")
    if mask_type == "learned_top_p":
        if top_mask is not None and not 0 < top_mask <= 1:
            message = f"expected a probability above 0 and at most 1, got {top_mask}; to keep a number of tokens, set "
            mistakes.append(Mistake(join(path, "top_mask"), message + "mask_type: learned_top_k"))
    elif top_mask is not None and (not isinstance(top_mask, int) or top_mask < 1):
        message = f"expected a whole number of at least 1 with mask_type: {mask_type}, got {top_mask}; to keep a share "
        mistakes.append(Mistake(join(path, "top_mask"), message + "of the probability, set mask_type: learned_top_p"))
    generation_kwargs = arguments.get("generation_kwargs") or {}
    if generation_kwargs.get("num_beams") not in (None, 1):
        message = "rollouts are sampled: no mask of allowed tokens belongs to a beam; beams are for train_evaluation"
        mistakes.append(Mistake(join(path, "generation_kwargs.num_beams"), message))
    for key in ("prompt_lookup_num_tokens", "assistant_early_exit"):
        if generation_kwargs.get(key) is not None:
            message = "writes several tokens at once; masks of allowed tokens are made for one after the other: drop it"
            mistakes.append(Mistake(join(path, f"generation_kwargs.{key}"), message))
    return mistakes
