"""The `alg.policy.args` block: all arguments of a policy with their defaults. Does not import torch or PEFT.

GENERATION_TYPES      numbers and flags of `generation_kwargs`
LoraArguments         supported fields of `peft`
checked_engine        `engine`: what generates the responses
checked_optimizer     `optimizer`
PolicyArguments       of all policies; MaskablePolicyArguments adds those of the maskable ones

A rule about the arguments of a policy alone is the method `issues` of their class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Interval, Lt
from pydantic import AfterValidator

from rl4lms_like.core.stop_strings import KEY as STOP_STRINGS
from rl4lms_like.engines import ENGINES
from rl4lms_like.engines.arguments import ServerArguments
from rl4lms_like.policies.quantization import KEY as QUANTIZATION
from rl4lms_like.policies.quantization import Quantization, quantization_issues
from rl4lms_like.policies.speedups import SpeedupFields, Speedups
from rl4lms_like.system.errors import ConfigError, ConfigIssue
from rl4lms_like.system.numbers import Count, Fraction, NonNegative, Positive, Whole
from rl4lms_like.system.schema import Block, RefusedError, check_arguments, check_value, join, read_block
from rl4lms_like.system.wording import shown

Arguments = TypeVar("Arguments", bound="PolicyArguments")

TrainVision: TypeAlias = Literal["none", "projector", "all"]
"""Parts of a model that are trained besides the language model; see `policies.vision_parts`."""

OWN_ENGINE = "transformers"
"""Id of the engine that is the policy's own model."""

ADAMW, ADAMW_8BIT = "adamw", "adamw_8bit"
"""Ids of optimizers; see `policies.optimizers`."""


# --- generation_kwargs ----------------------------------------------------------------------------------------------

GENERATION_TYPES: dict[str, Any] = {
    **dict.fromkeys(("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values"), bool),
    **dict.fromkeys(("max_new_tokens", "max_length", "num_beams", "num_beam_groups"), Count),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), Whole),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), Whole),
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty"), Positive),
    **dict.fromkeys(("top_p", "min_p"), Fraction),
    "typical_p": Annotated[float, Gt(0), Interval(le=1)],
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), Annotated[float, Ge(0), Interval(lt=1)]),
    "penalty_alpha": NonNegative,
    "length_penalty": float,
    "early_stopping": bool | Literal["never"],
    "cache_implementation": Literal["dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "quantized"],
    "max_cache_len": Count,
}
"""Arguments of transformers' `generate` -> valid values; null means the default.

transformers reports an invalid value only during a rollout, or silently generates something else. All other arguments
are checked after transformers is loaded (`policies.generation`).
"""

NEUTRAL: dict[str, Any] = {
    **{"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0},
    **{"repetition_penalty": 1, "no_repeat_ngram_size": 0},
}
"""Arguments of `generate` that change the sampled distribution -> value without effect. A missing `top_k` is 50."""
TRUNCATING = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Those that exclude tokens."""
_OF_LENGTH = (
    *("do_sample", "use_cache", "max_new_tokens", "max_length", "num_beams", "num_beam_groups", "early_stopping"),
    *("length_penalty", "post_processing_fn", "max_cache_len"),
)
_EXACT_CACHES = ("dynamic", "dynamic_full", "static", "offloaded", "offloaded_static")
"""Values of `cache_implementation` that do not change the sampled distribution; a quantized one does."""


UNKNOWN_DISTRIBUTION = ("top_h", "watermarking_config", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Arguments with which the probabilities of the sampled tokens cannot be recorded."""


def samples_other_distribution(generation_kwargs: Mapping[str, Any]) -> bool:
    """Return whether tokens are sampled from a known distribution that is not the model's own.

    Examples:
        >>> samples_other_distribution({"do_sample": True, "top_k": 0}), samples_other_distribution({"do_sample": True})
        (False, True)
    """
    if not generation_kwargs.get("do_sample") or generation_kwargs.get("num_beams") not in (None, 1):
        return False
    if any(generation_kwargs.get(key) is not None for key in UNKNOWN_DISTRIBUTION):
        return False
    applied = {"top_k": 50, **generation_kwargs}
    if applied.get("cache_implementation") in _EXACT_CACHES:
        del applied["cache_implementation"]
    return any(value not in (None, NEUTRAL.get(key, 0)) for key, value in applied.items() if key not in _OF_LENGTH)


def checked_generation(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate` with their numbers parsed.

    Raises:
        RefusedError: lists all errors.
    """
    coerced = dict(kwargs)
    issues: list[ConfigIssue] = []
    for key, value in kwargs.items():
        if key in GENERATION_TYPES and value is not None:
            coerced[key], value_issues = check_value(value, GENERATION_TYPES[key], str(key))
            issues += value_issues
        elif not isinstance(key, str):
            issues.append(ConfigIssue(str(key), "keys must be text"))
    if issues:
        raise RefusedError(*issues)
    return coerced


GenerationKwargs = Annotated[dict[str, Any], AfterValidator(checked_generation)]
"""Type of a mapping of arguments of `generate`."""


# --- peft -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoraArguments(Block):
    """Arguments of low-rank adapters (arXiv 2106.09685); names and defaults are those of PEFT's `LoraConfig`.

    Args:
        r: rank of the adapters.
        lora_alpha: adapters are scaled by `lora_alpha / r`.
        lora_dropout: dropout on the input of the adapters. It is active only if `dropout` is true, or in preference
            runs `adapters`.
        target_modules: layers that get adapters: a list of names, a regular expression, or `all-linear`; default:
            PEFT's choice for the model's family.
        exclude_modules: layers without adapters: a list of names, or a regular expression.
        layers_to_transform: indices of the blocks that get adapters; default: all.
        layers_pattern: name of the list of blocks, if PEFT does not find it.
        rank_pattern: mapping from a name or a regular expression to the rank of these layers.
        alpha_pattern: mapping from a name or a regular expression to `lora_alpha` of these layers.
        use_rslora: scale by `lora_alpha / sqrt(r)` (arXiv 2312.03732).
        use_dora: train magnitude and direction of the weights separately (arXiv 2402.09353).
        init_lora_weights: initialization of the adapters. With every value, new adapters do not change the model's
            output.
        bias: which biases are trained: none.
        trainable_token_indices: ids of tokens whose rows of the embeddings and of the output layer are trained whole.
            Those of the tokens that `tokenizer.add_tokens` and `chat_template: chatml` name are added to them.
        peft_type: kind of adapter; only LoRA is supported.
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
    trainable_token_indices: list[Whole] | None = None
    peft_type: Literal["LORA"] = "LORA"

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of PEFT's `LoraConfig`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "peft_type"}
        return fields | {"rank_pattern": dict(self.rank_pattern), "alpha_pattern": dict(self.alpha_pattern)}

    def issues(self) -> Iterator[ConfigIssue]:
        if self.target_modules in ([], ""):
            message = "is empty; list layers, write all-linear, or remove it to use PEFT's default for the family"
            yield ConfigIssue("target_modules", message)
        if self.trainable_token_indices == []:
            yield ConfigIssue("trainable_token_indices", "is empty; list ids of tokens, or remove it")

        # Regular expressions, by the key that has them. A list has names.
        patterns: list[tuple[str, str]] = []
        for key in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, key), str):
                patterns.append((key, getattr(self, key)))
        patterns += [("rank_pattern", pattern) for pattern in self.rank_pattern]
        patterns += [("alpha_pattern", pattern) for pattern in self.alpha_pattern]
        for key, pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield ConfigIssue(key, f"{shown(pattern)} is not a valid regular expression: {error}")


_INSTEAD = {
    "modules_to_save": "is not supported: these layers are weights of the base, which stays frozen",
    "task_type": "cannot be set: it is determined by the model's family",
    "inference_mode": "cannot be set: adapters are trained",
    "fan_in_fan_out": "cannot be set: it is determined by the layers",
    "base_model_name_or_path": "cannot be set: it is the model_name",
}
"""Fields of `LoraConfig` that would train or change weights of the base, which all networks share -> the reason."""


def checked_peft(peft: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of adapters, coerced to their types.

    Raises:
        RefusedError: lists all errors.
    """
    issues = [ConfigIssue(key, _INSTEAD[key]) for key in peft if key in _INSTEAD]
    known = {key: value for key, value in peft.items() if key not in _INSTEAD}
    adapters, type_issues = read_block(LoraArguments, known)
    issues += type_issues if adapters is None else adapters.issues()
    if issues or adapters is None:
        raise RefusedError(*issues)
    return {key: getattr(adapters, key) for key in known}


Peft = Annotated[dict[str, Any], AfterValidator(checked_peft)]
"""Type of a `peft` block."""


# --- engine ---------------------------------------------------------------------------------------------------------


def checked_engine(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the id, `args` and `ahead` of an engine, its arguments coerced to their types.

    Raises:
        RefusedError: lists all errors.
    """
    if not isinstance(engine.get("id"), str) or set(engine) - {"id", "args", "ahead"}:
        raise RefusedError(ConfigIssue("", f"expected a mapping with id, args and ahead; got {shown(engine)}"))
    _, issues = check_value(engine.get("ahead", 0), Whole, "ahead")
    args, args_issues = check_value(engine.get("args"), dict[str, Any], "args")
    issues += args_issues

    try:
        target = ENGINES.arguments_class(engine["id"])
    except ConfigError as error:
        issues += [ConfigIssue("id", issue.message) for issue in error.issues]
        target = None
    if target is not None and not args_issues:
        args, args_issues = check_arguments(target, args, "args")
        # A class of arguments validates addresses and the like itself.
        if isinstance(target, type) and not args_issues:
            try:
                target(**args)
            except ValueError as error:
                args_issues = [ConfigIssue("args", str(error))]
        issues += args_issues

    if issues:
        raise RefusedError(*issues)
    return {**engine, "args": args}


Engine = Annotated[dict[str, Any], AfterValidator(checked_engine)]
"""Type of an `engine` block."""


def unsupported_generation(engine: str, generation_kwargs: Mapping[str, Any], path: str) -> list[ConfigIssue]:
    """Return an error for each argument of `generate` at a path of the config that a valid engine does not support."""
    unsupported = getattr(ENGINES.arguments_class(engine), "unsupported", None)
    if unsupported is None:  # an engine that does not say so
        return []
    message = f"is not supported by the engine {engine}; remove it, or use engine: {{id: {OWN_ENGINE}}}"
    return [ConfigIssue(join(path, key), message) for key in unsupported(generation_kwargs)]


def checked_optimizer(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the block of an optimizer, which has only an id: its arguments are `optimizer_kwargs`.

    Raises:
        RefusedError: it is another one.
    """
    if optimizer not in ({"id": ADAMW}, {"id": ADAMW_8BIT}):
        message = f"expected {{id: {ADAMW}}} or {{id: {ADAMW_8BIT}}}; got {shown(optimizer)}"
        raise RefusedError(ConfigIssue("", message))
    return optimizer


Optimizer = Annotated[dict[str, Any], AfterValidator(checked_optimizer)]
"""Type of an `optimizer` block."""


def generates_ahead(arguments: Mapping[str, Any]) -> bool:
    """Return whether rollouts are generated during the update before them, by the arguments of a policy."""
    engine = arguments.get("engine")
    return isinstance(engine, Mapping) and bool(engine.get("ahead"))


# --- policies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PolicyArguments(Block):
    """Arguments of the language-model actor-critic policies.

    Args:
        model_name: hub id or local folder of the policy, and by default also of the critic and the reference model.
        optimizer: `{id: adamw}`, or `{id: adamw_8bit}`: torchao's AdamW, whose moments need 2 instead of 8 bytes for
            each trained parameter.
        optimizer_kwargs: further arguments of the optimizer. `fused` of `adamw` is true unless it is set here.
        offload: `moments` keeps the moments of the optimizer in main memory between updates, so that rollouts and
            evaluations have their memory; null leaves them on the device.
        weight_decay: weight decay of all parameters except biases and the weights of normalization layers.
        apply_model_parallel: key of RL4LMs' configs without an effect.
        generation_kwargs: sampling arguments of rollouts, passed to transformers' `generate`. If `top_k` is not set,
            transformers uses 50. `top_k: 0` samples from the distribution that is trained.
        engine: id and args of what generates the responses of rollouts and evaluations: `transformers`, the policy's
            own model; `vllm` or `sglang`, a server with the policy's weights; or a user's engine. With `ahead: k`, an
            external engine generates each rollout during the `k` updates before it, with the weights before these.
        prompt_truncation_side: side on which long prompts are truncated in evaluations. Rollouts use the key of this
            name in `env.args`.
        critic: `separate`: a second network that starts from the same weights. `shared`: a value head on the policy's
            network. `none`: all values are 0. Default: `separate`, or `none` for algorithms that learn no values.
        critic_model: hub id or folder of the initial weights of a separate critic, also of another size or
            architecture with the policy's tokenizer, or a critic that was saved by `critic_pretrain`. Default:
            `model_name`.
        critic_device: device of a separate critic, such as `cuda:1`; default: that of the policy (`device`). Not with
            `peft`, whose frozen weights the networks share, nor with several processes, which have one device each.
        critic_frozen: regular expressions; the parameters of a separate critic whose names match one are not trained.
        value_head_init: `zero`: initial values are 0. `default`: torch's initialization of a linear layer, with random
            initial values that are larger than most rewards.
        reference_model: hub id or local folder of the frozen model of the KL penalty; default: `model_name`.
        reference_device: device of the reference model or the teacher; as `critic_device`.
        teacher_model: for `opd`: hub id or local folder of the frozen model that the policy learns from, in place of
            `reference_model`. It has the policy's tokenizer and family, and can have another size or architecture.
        dtype: `float32`, or `bfloat16` for autocast with weights in float32. Log-probs are always computed from logits
            in float32.
        generation_dtype: precision of linear layers while rollouts are generated; default: that of `dtype`. Another one
            samples from another distribution than the one that is trained, for which the loss corrects by its ratios
            or by `importance_correction`. Evaluations always use `dtype`.
        reference_dtype: `bfloat16` stores the linear layers of the reference or the teacher in bfloat16, in half of the
            memory, and multiplies with them in bfloat16.
        attn_implementation: attention of transformers: `eager`, `sdpa`, `flash_attention_2` ...; default: transformers'
            choice.
        gradient_checkpointing: recompute activations in the backward pass. This needs less memory and more time.
        activation_offload: keep activations in main memory from the forward to the backward pass.
        compile: apply `torch.compile` to the networks of the update.
        dropout: use the model's dropout in updates. The ratios of the first minibatch then differ from 1.
        peft: train low-rank adapters instead of the weights. The keys are fields of PEFT's `LoraConfig`, for example
            `{r: 8, lora_alpha: 16}`.
        merge_on_save: with `peft`: merge the adapters into the base model and save a whole model. Otherwise only the
            adapters are saved.
        quantization: with `peft`: store the linear layers of all networks quantized, their output layers excepted.
            `{id: nf4}`: in 4 bits by bitsandbytes (QLoRA), with `double: true` also their scales. `{id: int8}`: in 8
            bits by torchao.
        logits_budget_mb: limit in MiB for the logits that a forward pass stores for its backward pass. If they need
            more (4 bytes x tokens x vocabulary size), they are recomputed in chunks of this size.
        packing: `auto` computes the rows of a batch behind one another, without padding between them, where their
            lengths make it faster and the model stays exact, which is checked when it is loaded; null pads them.
        speedups: exact speedups, each of which can be turned off, for example `{keep_freed_memory: false}`.
        trust_remote_code: allow running code that comes with the model.
    """

    model_name: str
    optimizer: Optimizer = field(default_factory=lambda: {"id": ADAMW})
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    offload: Literal["moments"] | None = None
    weight_decay: NonNegative = 1e-6
    apply_model_parallel: bool = True
    generation_kwargs: GenerationKwargs = field(default_factory=dict)
    engine: Engine = field(default_factory=lambda: {"id": "transformers"})
    prompt_truncation_side: Literal["left", "right"] = "left"
    critic: Literal["separate", "shared", "none"] = "separate"
    critic_model: str | None = None
    critic_device: str | None = None
    critic_frozen: list[str] = field(default_factory=list)
    value_head_init: Literal["zero", "default"] = "zero"
    reference_model: str | None = None
    reference_device: str | None = None
    teacher_model: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    generation_dtype: Literal["float32", "bfloat16"] | None = None
    reference_dtype: Literal["float32", "bfloat16"] = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    compile: bool = False
    dropout: bool = False
    peft: Peft | None = None
    merge_on_save: bool = False
    quantization: Quantization | None = None
    logits_budget_mb: Annotated[float, Ge(1)] = 512
    packing: Literal["auto"] | None = None
    speedups: SpeedupFields = field(default_factory=dict)
    trust_remote_code: bool = False

    @property
    def used_speedups(self) -> Speedups:
        """Speedups with the defaults of those that are not given."""
        return Speedups(**self.speedups)

    @property
    def merging_obstacle(self) -> str:
        """Setting with which merged adapters would not compute what separate ones do; empty if there is none."""
        peft = self.peft or {}

        # Merged copies would need the memory that quantized weights save.
        if self.quantization is not None:
            return QUANTIZATION
        # In 8 bits, W + s B A would lose most of a small change of W.
        if self.dtype == "bfloat16":
            return "dtype: bfloat16"
        # The passes that are repeated by the backward pass, and torch's compiled ones, are those of the model.
        if self.gradient_checkpointing:
            return "gradient_checkpointing: true"
        if self.compile:
            return "compile: true"
        if peft.get("use_dora"):
            return "peft.use_dora: true"
        if self.dropout and peft.get("lora_dropout"):
            return "dropout: true and peft.lora_dropout"
        return ""

    @property
    def merges_adapters(self) -> bool:
        """True if adapters are merged for forward passes."""
        return self.peft is not None and self.used_speedups.merged_adapters and not self.merging_obstacle

    @property
    def trained_vision(self) -> TrainVision:
        """The trained parts of a model's vision; all of a model without one."""
        return "all"

    @property
    def kl_model(self) -> str | None:
        """Name of the model to which the KL is measured; None is the initial policy."""
        return self.reference_model if self.teacher_model is None else self.teacher_model

    @property
    def samples_policy(self) -> bool:
        """True if the log-probs of the sampling are those of the policy's pass over a rollout, up to rounding.

        Stop strings end responses, but do not change their distribution. Two passes in bfloat16 differ too much; with
        another precision of the sampling alone, a loss can have its ratios to that.
        """
        kwargs = {key: value for key, value in self.generation_kwargs.items() if key != STOP_STRINGS}
        is_known = not self.is_greedy and not any(kwargs.get(key) is not None for key in UNKNOWN_DISTRIBUTION)
        is_right_dtype = self.dtype == "float32" or self.generates_in_other_dtype
        is_exact = self.engine["id"] == OWN_ENGINE and is_right_dtype and not self.dropout
        return is_known and is_exact and not samples_other_distribution(kwargs)

    @property
    def generates_in_other_dtype(self) -> bool:
        """True if rollouts are generated with another precision than they are scored with."""
        return self.generation_dtype not in (None, self.dtype)

    @property
    def generates_packed(self) -> bool:
        """True if nothing among these arguments prevents packed weights from being used for generation."""
        return not self.compile and "float32" in (self.dtype, self.generation_dtype)

    @property
    def is_ahead(self) -> bool:
        """True if rollouts are generated during the updates before them."""
        return generates_ahead({"engine": self.engine})

    @property
    def n_ahead(self) -> int:
        """Number of updates between the weights that generate a rollout and those that it trains."""
        return int(self.engine.get("ahead", 0))

    @property
    def is_greedy(self) -> bool:
        """True if rollouts are not sampled token by token."""
        kwargs = self.generation_kwargs
        return not kwargs.get("do_sample") or kwargs.get("num_beams") not in (None, 1)

    @classmethod
    def known_in(cls: type[Arguments], arguments: Mapping[str, Any]) -> Arguments:
        """Build from those of `arguments` that are fields of this class; a user's policy may have further ones."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in arguments.items() if name in names})

    def issues(self) -> Iterator[ConfigIssue]:
        yield from self._critic_issues()
        yield from self._engine_issues()
        if self.merge_on_save and self.peft is None:
            yield ConfigIssue("merge_on_save", "there are no adapters to merge without peft")
        yield from self._quantization_issues()
        if self.packing is not None and self.compile:
            yield ConfigIssue("packing", "is not supported with compile: remove one of them")
        if self.activation_offload and self.compile:
            yield ConfigIssue("activation_offload", "is not supported with compile: remove one of them")

        # Kernels of the hub, `owner/name`: their code is downloaded and run.
        name = self.attn_implementation
        if name is not None and "/" in name and not self.trust_remote_code:
            message = f"{name!r} would run code from the hub; if you trust it, set "
            yield ConfigIssue("attn_implementation", f"{message}alg.policy.args.trust_remote_code: true")

    def _quantization_issues(self) -> Iterator[ConfigIssue]:
        if self.quantization is None:
            return
        yield from quantization_issues(self.quantization, self.peft)
        if self.generates_in_other_dtype:
            message = f"{self.generation_dtype} is for layers in float32, which quantization replaces; remove it"
            yield ConfigIssue("generation_dtype", message)
        if self.reference_dtype == "bfloat16":
            message = "bfloat16 is for layers in float32, which quantization replaces in the reference too; remove it"
            yield ConfigIssue("reference_dtype", message)
        if self.compile:
            yield ConfigIssue("compile", "is not supported with quantization; remove one of them")

    def _critic_issues(self) -> Iterator[ConfigIssue]:
        if self.critic == "shared":
            message = "is for a separate critic; set critic to 'separate', or remove it"
            for key in ("critic_device", "critic_frozen"):
                if getattr(self, key):
                    yield ConfigIssue(key, message)
            if self.critic_model is not None:
                message = "is the network of a separate critic; set critic to 'separate', or remove it"
                yield ConfigIssue("critic_model", message)

        for index, pattern in enumerate(self.critic_frozen):
            try:
                re.compile(pattern)
            except re.error as error:
                yield ConfigIssue(f"critic_frozen.{index}", f"{pattern!r} is not a regular expression: {error}")

        if self.peft is not None:
            for key in ("critic_device", "reference_device"):
                if getattr(self, key) is not None:
                    yield ConfigIssue(key, "with peft the networks share their frozen weights; remove it")

    def _engine_issues(self) -> Iterator[ConfigIssue]:
        id = self.engine["id"]
        if id == OWN_ENGINE:
            if self.is_ahead:
                message = f"{id} generates with the model that is updated; use an external engine such as vllm"
                yield ConfigIssue("engine.ahead", message)
            return

        args = self.engine.get("args") or {}
        arguments_class = ENGINES.arguments_class(id)
        is_server = isinstance(arguments_class, type) and issubclass(arguments_class, ServerArguments)
        if self.is_ahead and is_server and args.get("sleep"):
            message = "is not possible with ahead, where the engine generates during updates"
            yield ConfigIssue("engine.args.sleep", message)
        if self.model_name == args.get("weights_dir"):
            message = "is the folder of the model, which would be overwritten; give another one"
            yield ConfigIssue("engine.args.weights_dir", message)
        if is_server and args.get("sync") == "adapters":
            yield from self._adapter_sync_issues(id, arguments_class.UNSUPPORTED_PEFT)
        if self.generation_dtype is not None:
            yield ConfigIssue("generation_dtype", f"is for the policy's own model; {id} has its own dtype, remove it")
        yield from unsupported_generation(id, self.generation_kwargs, "generation_kwargs")

    def _adapter_sync_issues(self, id: str, unsupported_peft: Sequence[str]) -> Iterator[ConfigIssue]:
        """Yield an error for each kind of adapter that the servers of an engine do not load."""
        if self.peft is None:
            yield ConfigIssue("engine.args.sync", "there are no adapters without peft; use sync: weights")
            return
        for key in unsupported_peft:
            if self.peft.get(key):
                message = f"the engine {id} does not load such adapters; use engine.args.sync: weights"
                yield ConfigIssue(f"peft.{key}", message)

    def family_issues(self, *, is_causal: bool) -> Iterator[ConfigIssue]:
        """Yield the errors of values that do not fit the family of the model: decoder-only, or not."""
        id = self.engine["id"]
        if id != OWN_ENGINE and not is_causal:
            message = f"{id} generates with decoder-only models only; use {OWN_ENGINE}"
            yield ConfigIssue("engine.id", message)
        if self.packing is not None and not is_causal:
            yield ConfigIssue("packing", "is for decoder-only models; remove it")


@dataclass(frozen=True, kw_only=True)
class VisionPolicyArguments(PolicyArguments):
    """Arguments of the policy for vision-language models, in addition to those of all policies.

    Args:
        train_vision: what is trained besides the language model: `none`, the `projector` that turns features of
            images into embeddings, or `all`, which is the tower too. With `peft`, the same layers get adapters.
        max_pixels: images with more pixels (width times height) are made smaller before the model's processor gets
            them; null is the processor's own limit.
    """

    train_vision: TrainVision = "none"
    max_pixels: Count | None = None

    @property
    def trained_vision(self) -> TrainVision:
        return self.train_vision

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        id = self.engine["id"]
        if id != OWN_ENGINE:
            yield ConfigIssue("engine.id", f"{id} gets prompts without their images; use {OWN_ENGINE}")
        if self.compile:
            yield ConfigIssue("compile", "is not supported for vision-language models; remove it")
        if self.quantization is not None:
            yield ConfigIssue(QUANTIZATION, "is not supported for vision-language models; remove it")
        if self.packing is not None:
            yield ConfigIssue("packing", "is for models that read texts only; remove it")


def shared_arguments(arguments: Mapping[str, Any]) -> tuple[PolicyArguments | None, list[ConfigIssue]]:
    """Read those arguments of any policy that are names of the library's; None if a value has another type.

    A policy of a user may have further ones, and no model.
    """
    names = {field.name for field in fields(PolicyArguments)}
    shared = {name: value for name, value in arguments.items() if name in names}
    return read_block(PolicyArguments, {"model_name": "", **shared})


@dataclass(frozen=True, kw_only=True)
class MaskablePolicyArguments(PolicyArguments):
    """Arguments of the maskable policies, in addition to those of all policies (NLPO, arXiv 2210.01241).

    Args:
        mask_type: which tokens are allowed. `learned_top_k` and `learned_top_p`: the most probable tokens of the mask
            model, an older copy of the policy. `topk`: those of the policy itself after `generation_kwargs`, without a
            mask model.
        top_mask: for `learned_top_p`: total probability of the allowed tokens, above 0 and at most 1. For the other
            types: number of allowed tokens.
        min_tokens_to_keep: for `learned_top_p`: minimum number of allowed tokens. Special tokens are allowed with every
            type.
        target_update_iterations: number of iterations between two updates of the mask model with the policy's weights.
        mask_ema: weight of the old mask model in each of its updates, where the policy has the rest; null copies the
            policy's weights.
    """

    mask_type: Literal["learned_top_k", "learned_top_p", "topk"] = "learned_top_k"
    top_mask: int | float
    min_tokens_to_keep: Count = 100
    target_update_iterations: Count = 1000
    mask_ema: Annotated[float, Ge(0), Lt(1)] | None = None

    def issues(self) -> Iterator[ConfigIssue]:
        yield from super().issues()
        top_mask = self.top_mask
        if self.mask_type == "learned_top_p" and not 0 < top_mask <= 1:
            message = f"expected a probability above 0 and at most 1, got {top_mask}; to keep a number of tokens, set "
            yield ConfigIssue("top_mask", f"{message}mask_type: learned_top_k")
        if self.mask_type != "learned_top_p" and (not isinstance(top_mask, int) or top_mask < 1):
            message = (
                f"expected a whole number of at least 1 with mask_type: {self.mask_type}, got {top_mask}; to keep "
            )
            yield ConfigIssue("top_mask", f"{message}a fraction of the probability mass, set mask_type: learned_top_p")

        if self.quantization is not None and self.mask_type != "topk":
            message = "needs a whole mask model in float32; set mask_type: topk, or remove it"
            yield ConfigIssue(QUANTIZATION, message)

        # A mask is computed for each token of the one response that is sampled.
        if self.generation_kwargs.get("num_beams") not in (None, 1):
            message = "rollouts with masks of allowed tokens cannot use beam search; use it in train_evaluation only"
            yield ConfigIssue("generation_kwargs.num_beams", message)
        for key in ("prompt_lookup_num_tokens", "assistant_early_exit"):
            if self.generation_kwargs.get(key) is not None:
                message = "generates several tokens per step, but masks are computed token by token: remove it"
                yield ConfigIssue(f"generation_kwargs.{key}", message)

        id = self.engine["id"]
        if id != OWN_ENGINE:
            message = f"{id} cannot restrict tokens to those of a mask model; use {OWN_ENGINE}"
            yield ConfigIssue("engine.id", message)
