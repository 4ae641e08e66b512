"""Keys of `alg.training_args` that a run refuses, because they are set by the run or would have no effect.

NOT_SETTABLE       in every run: set by the run, not supported, or read by nothing that these runs do
SUPERVISED_ONLY    in preference runs, whose objectives do not read them
conditions         without another key, or with an optimizer that does not read them

A run that an earlier version started with a key that had no effect is resumed without it (`without_unused_keys`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from rl4lms_like.config.run_config import AnyConfig, OfflineConfig, PreferenceConfig, RunConfig
from rl4lms_like.core.not_included import NOT_INCLUDED
from rl4lms_like.system.errors import ConfigIssue
from rl4lms_like.system.schema import join, signature_of

PATH = "alg.training_args"

AnyRun = TypeVar("AnyRun", bound=AnyConfig)


def _by_key(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return reason -> keys as key -> reason."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


SET_BY_RUN = _by_key({
    "use the config's own seed": "seed data_seed",
    "use the config's own device": "use_cpu",
    "the run has its own tracker; --log_to_wandb logs to Weights & Biases": "report_to",
    "repeat the same command, or use --resume": (
        "resume_from_checkpoint restore_callback_states_from_checkpoint ignore_data_skip"
    ),
    "metrics are set by train_evaluation.metrics": "include_for_metrics batch_eval_metrics prediction_loss_only",
    "evaluation uses the precision of training; bf16 computes in bfloat16": "bf16_full_eval fp16_full_eval",
    "it is set by the run": "output_dir run_name disable_tqdm remove_unused_columns do_train do_eval do_predict",
    "torchrun starts several processes, and `distributed` has their settings": (
        "fsdp fsdp_config local_rank ddp_backend ddp_timeout"
    ),
    "runs are not uploaded": "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push",
}) | {key: row.sentence for row in NOT_INCLUDED for key in row.keys.split()}  # fmt: skip
"""Keys that are set by the run or not supported, and why."""

WITHOUT_EFFECT = _by_key({
    "gradients of several processes are summed by the run": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "average_tokens_across_devices"
    ),
    "only the main process logs and saves": "log_on_each_node save_on_each_node log_level_replica",
    "the run has its own log; the variable TRANSFORMERS_VERBOSITY sets the messages of transformers": "log_level",
    "--log_to_trackio logs to Trackio": "project trackio_space_id trackio_bucket_id trackio_static_space_id",
    "a loss that is not finite is an error": "logging_nan_inf_filter debug",
    "evaluations keep only sums": "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps",
    "a run that is stopped saves its state anyway": "enable_jit_checkpoint",
    "runs are not uploaded": "hub_revision",
    "the run logs its speed, and `check` estimates the memory": "skip_memory_metrics",
    "the examples are made by the run": "label_names length_column_name",
    "another batch size would train another model; the error for too little memory names the keys to lower": (
        "auto_find_batch_size"
    ),
})  # fmt: skip
"""Keys that nothing in these runs reads, and what there is instead. Earlier versions accepted them."""

NOT_SETTABLE = SET_BY_RUN | WITHOUT_EFFECT
"""Keys of `TrainingArguments` that no run accepts -> the reason, for the error message."""

SUPERVISED_ONLY = _by_key({
    "noise in embeddings is for supervised runs; the log-probs of preferences are computed without it": (
        "neftune_noise_alpha"
    ),
    "objectives on preferences compute shared prompts once, with modules that are not compiled": (
        "torch_compile torch_compile_backend torch_compile_mode"
    ),
    "no cache is filled where log-probs of given texts are computed": "use_cache",
    "the number of tokens is counted in any case, on the time axis of the logs": "include_num_input_tokens_seen",
})  # fmt: skip
"""Keys that objectives on preferences do not read -> the reason."""

VISION_WITHOUT_EFFECT = _by_key({
    "vision-language models are not compiled": "torch_compile torch_compile_backend torch_compile_mode",
    "labels after prompts with images are not smoothed": "label_smoothing_factor",
    "no cache is filled where log-probs of given texts are computed": "use_cache",
    "the number of tokens is counted in any case, on the time axis of the logs": "include_num_input_tokens_seen",
})  # fmt: skip
"""Keys that supervised runs of vision-language models do not read -> the reason."""

_NEEDS = {
    "liger_kernel_config": ("use_liger_kernel",),
    "activation_checkpointing_kwargs": ("activation_checkpointing", "gradient_checkpointing"),
    "gradient_checkpointing_kwargs": ("gradient_checkpointing", "activation_checkpointing"),
    "dataloader_persistent_workers": ("dataloader_num_workers",),
    "dataloader_prefetch_factor": ("dataloader_num_workers",),
    "dataloader_multiprocessing_context": ("dataloader_num_workers",),
    "dataloader_in_order": ("dataloader_num_workers",),
}
"""Key -> keys of which one must be set for it to have an effect."""

_OPTIM_ARGS = {
    "sgd": "momentum dampening nesterov",
    "adagrad": "lr_decay eps",
    "rmsprop": "momentum alpha eps centered",
}
"""Optimizer of torch -> names in `optim_args` that it reads; the weight decay is another key."""
_READ_OPTIM_ARGS = (
    "anyprecision", "ademamix", "rmsprop_bnb", "galore", "apollo", "grokadamw", "adamw_torch_4bit", "adamw_torch_8bit",
    "schedule_free", "stable_adamw",
)  # fmt: skip
"""Parts of the names of other optimizers that read `optim_args`."""
_WITHIN_BACKWARD = (
    "it changes weights within the backward pass, before gradients are clipped or summed over processes, and its state "
    "would not be in checkpoints"
)
_UNSUPPORTED_OPTIMIZERS = {
    "schedule_free": "evaluations and saved models would have its weights of training, which are not those it averages",
    "layerwise": _WITHIN_BACKWARD,
    "lomo": _WITHIN_BACKWARD,
}
"""Part of the names of optimizers with which a run would not be right -> the reason."""
_NOT_IN_CHECKPOINTS = ("galore", "apollo", "grokadamw", "stable_adamw", "adamw_torch_4bit")
"""Parts of the names of optimizers with a state that is no tensor of a parameter, or none that torch can copy."""
_LOW_RANK = ("galore", "apollo")
"""Parts of the names of optimizers that read `optim_target_modules`."""


class Package(NamedTuple):
    """Module that must be importable, and the name with which pip installs it."""

    module: str
    install: str


_PACKAGES = {
    "galore": Package("galore_torch", "galore-torch"),
    "apollo": Package("apollo_torch", "apollo-torch"),
    "grokadamw": Package("grokadamw", "grokadamw"),
    "stable_adamw": Package("optimi", "torch-optimi"),
    "adamw_torch_4bit": Package("torchao", "torchao"),
    "adamw_torch_8bit": Package("torchao", "torchao"),
    "anyprecision": Package("torchdistx", "torchdistx"),
    "adamw_torch_xla": Package("torch_xla", "torch-xla"),
    "npu": Package("torch_npu", "torch-npu"),
    **dict.fromkeys(("bnb", "8bit", "paged", "ademamix", "lion"), Package("bitsandbytes", "bitsandbytes")),
}
"""Part of an optimizer's name -> the package it needs; the first part that fits counts."""


def unused_keys(config: OfflineConfig) -> dict[str, str]:
    """Return the keys that would have no effect in a run, and the reasons; earlier versions accepted them."""
    arguments = config.alg.training_args
    unused = {key: WITHOUT_EFFECT[key] for key in arguments if key in WITHOUT_EFFECT}

    # A default that is written down changes nothing, and may come from a config that supervised runs share.
    changed = dict(_changed(arguments))
    if isinstance(config, PreferenceConfig):
        unused |= {key: SUPERVISED_ONLY[key] for key in changed if key in SUPERVISED_ONLY}
    elif config.reads_pictures:
        unused |= {key: VISION_WITHOUT_EFFECT[key] for key in changed if key in VISION_WITHOUT_EFFECT}
    for key, needed in _NEEDS.items():
        if key in changed and not any(arguments.get(name) for name in needed):
            unused[key] = f"it has no effect without {needed[0]}"

    optimizer = str(arguments.get("optim", ""))
    reads_names = optimizer in _OPTIM_ARGS or any(part in optimizer for part in _READ_OPTIM_ARGS)
    if "optim_args" in changed and not reads_names:
        unused["optim_args"] = f"the optimizer{f' {optimizer}' * bool(optimizer)} does not read it"
    if "optim_target_modules" in changed and not any(part in optimizer for part in _LOW_RANK):
        unused["optim_target_modules"] = "only the optimizers galore_* and apollo_* read it"
    return unused


def float16_reason(config: OfflineConfig) -> str | None:
    """Return why `fp16` has no effect in a run on this machine; None if it has one, or is not set."""
    from stable_baselines3.common.utils import get_device

    # The Trainer computes in float32 there. Objectives on preferences have a precision of their own.
    is_on_cpu = get_device(config.device).type == "cpu"
    if isinstance(config, PreferenceConfig) or not config.alg.training_args.get("fp16") or not is_on_cpu:
        return None
    return "a supervised run in float16 needs a GPU; bf16 computes in bfloat16 on a CPU too"


def _changed(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments whose values are not the default of `TrainingArguments`."""
    from transformers import TrainingArguments

    defaults = {argument.name: argument.default for argument in signature_of(TrainingArguments).arguments}
    for key, value in arguments.items():
        if key in defaults and value != defaults[key]:
            yield key, value


def settable_issues(config: OfflineConfig) -> list[ConfigIssue]:
    """Return the errors in the keys that a run refuses, and those about missing packages."""
    reasons = {key: SET_BY_RUN[key] for key in config.alg.training_args if key in SET_BY_RUN} | unused_keys(config)
    issues = [ConfigIssue(join(PATH, key), f"cannot be set: {reason}") for key, reason in reasons.items()]
    if "optim_args" not in reasons:
        issues += _optim_args_issues(config.alg.training_args)

    issues += _optimizer_issues(config.alg.training_args)
    return [*issues, *_package_issues(config.alg.training_args)]


def _optimizer_issues(arguments: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield an error for an optimizer with which a run would not be right."""
    optimizer = str(arguments.get("optim", ""))
    for part, reason in _UNSUPPORTED_OPTIMIZERS.items():
        if part in optimizer:
            yield ConfigIssue(join(PATH, "optim"), f"{optimizer!r} is not supported: {reason}")
            return
    if any(part in optimizer for part in _NOT_IN_CHECKPOINTS) and not arguments.get("save_only_model"):
        text = f"the state of {optimizer!r} cannot be part of checkpoints, from which a run is resumed"
        yield ConfigIssue(join(PATH, "optim"), f"{text}; set save_only_model: true, or use another optimizer")


def _optim_args_issues(arguments: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield the errors in a text such as `momentum=0.9, nesterov=true`, of which transformers skips unknown names."""
    text = arguments.get("optim_args")
    if not isinstance(text, str):
        return
    path = join(PATH, "optim_args")
    known = _OPTIM_ARGS.get(str(arguments.get("optim")))
    for part in text.replace(" ", "").split(","):
        name, equals, _ = part.partition("=")
        if not equals:
            yield ConfigIssue(path, f"expected name=value, separated by commas; got {part!r}")
        elif known is not None and name not in known.split():
            yield ConfigIssue(path, f"{name!r} is not read by {arguments['optim']}; known: {', '.join(known.split())}")


def _package_issues(arguments: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield an error for each package that a value needs and that is not installed."""
    needed = {}
    optimizer = str(arguments.get("optim", ""))
    for part, package in _PACKAGES.items():
        if part in optimizer:
            needed["optim"] = package
            break
    if arguments.get("use_liger_kernel"):
        needed["use_liger_kernel"] = Package("liger_kernel", "liger-kernel")

    for key, package in needed.items():
        if importlib.util.find_spec(package.module) is None:
            text = f"{arguments[key]!r} needs the package {package.module}: pip install {package.install}"
            yield ConfigIssue(join(PATH, key), text)


def without_unused_keys(config: AnyRun) -> tuple[AnyRun, list[str]]:
    """Return the config of a resumed run without keys that had no effect in it, and a notice for each of them."""
    if isinstance(config, RunConfig):
        return config, []
    unused = unused_keys(config)
    reason = float16_reason(config)
    if reason is not None:
        unused["fp16"] = reason

    notices = [f"{join(PATH, key)} is ignored, as before: {reason}" for key, reason in unused.items()]
    kept = {key: value for key, value in config.alg.training_args.items() if key not in unused}

    # Names that the optimizer does not read, in a text of several arguments.
    known = _OPTIM_ARGS.get(str(kept.get("optim")))
    if known is not None and isinstance(kept.get("optim_args"), str):
        assignments = kept["optim_args"].replace(" ", "").split(",")
        read = [assignment for assignment in assignments if assignment.partition("=")[0] in known.split()]
        if read != assignments:
            kept["optim_args"] = ",".join(read) or None
            notices.append(f"{join(PATH, 'optim_args')}: only {', '.join(read) or 'nothing'} is read, as before")
    alg: Any = replace(config.alg, training_args=kept)
    return replace(config, alg=alg), notices
